"""The parser of the command line: argparse's, which names the verbs and options that a misspelt word may have meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction["Parser"]
else:
    Verbs = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """A parser of the command line, of a verb, or of a group of verbs.

    Attributes:
        details: what the help ends with. It is called when the help is printed, since it may read files.
        about_options: what to say about an option that does not exist, besides the near ones.
    """

    details: Callable[[], str] | None = None
    about_options: str = ""
    _verbs: Verbs | None = None

    def add_verbs(self) -> Verbs:
        """Make this the parser of verbs."""
        self._verbs = self.add_subparsers(title="verbs", metavar="VERB", required=True)
        return self._verbs

    def option_names(self) -> list[str]:
        """Every option, such as `--nodes`."""
        return sorted(self._option_string_actions)

    def format_help(self) -> str:
        """The help, with `details` at its end."""
        return super().format_help() + (f"\n{self.details()}" if self.details else "")

    def wrong_verb(self, words: Sequence[str]) -> str | None:
        """Say what is wrong with the verb at the beginning of the words.

        Args:
            words: what follows the parser's own name.

        Returns:
            The message; None if there is such a verb, or if an option stands in its place.
        """
        if self._verbs is None or (words and words[0].startswith("-")):
            return None
        verbs = self._verbs.choices
        known = f"`{self.prog} --help` says what each does."
        if not words:
            return f"A verb is missing after `{self.prog}`: {', '.join(verbs)}. {known}"
        if words[0] in verbs:
            return verbs[words[0]].wrong_verb(words[1:])
        from azureml_strategy.training.recipes import near_matches

        wrong = " ".join([*self.prog.split()[1:], words[0]])
        return f"There is no verb {wrong!r}. {near_matches(words[0], verbs)} {known}"

    def wrong_words(self, words: Sequence[str]) -> str:
        """Say what is wrong with words that this parser does not know."""
        from azureml_strategy.training.recipes import near_matches

        known = f"`{self.prog} --help` lists what it takes."
        option = next((word.split("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            return f"{self.prog} takes no {words[0]!r}. {known}"
        near = near_matches(option, self.option_names())
        wrong = f"{self.prog} has no option {option!r}."
        return " ".join(filter(None, (wrong, near if "mean" in near else "", self.about_options, known)))
