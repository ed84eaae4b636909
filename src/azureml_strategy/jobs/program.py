"""Plans the job of a user's own program: a script, a module, or a command that the user wrote for a shell."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from azureml_strategy.cluster.environ import CHECKPOINT_SWITCH
from azureml_strategy.jobs.environment_file import find_environment_file
from azureml_strategy.jobs.environments import describe_environment
from azureml_strategy.jobs.hyperparameters import AUTOTUNING, Sweep
from azureml_strategy.jobs.plan import JobPlan, check_code, check_words, refuse_secret_settings, refuse_secrets
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import (
    ClusterSettings,
    InputSettings,
    JobSettings,
    OutputSettings,
    check_choice,
    read_section,
)
from azureml_strategy.training.checks import compose_settings
from azureml_strategy.training.recipes import RecipeError, near_matches

# What Azure ML replaces in a command.
REFERENCE = re.compile(r"\$\{\{\s*((?:inputs|outputs|search_space)\.\w+)\s*\}\}")
_LOOKS_LIKE_REFERENCE = re.compile(r"\$\{\{\s*(?:inputs|outputs|search_space)\b[^}]*\}\}")
# azure-ai-ml makes references of an older form, `{inputs.x}`, as well.
_BRACKETS = re.compile(r"\{(?=\{|inputs\.|outputs\.|search_space\.)")

# These programs start the processes of a node themselves, so that Azure ML starts one process on each node.
_STARTERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate launch", "deepspeed")
_CHECKPOINTS = ("auto", "any", "never", "off")
NO_CODE = "none"  # `job.code`: the job gets no folder

# A shell would read these inside double quotes.
_SHELL_READS = re.compile(r'["$`\\\n]')
_URL = re.compile(r"(?:azureml:|[a-z][a-z0-9+.-]+://)")


def quote_argument(argument: str, references: Collection[str]) -> str:
    """Quote an argument for the shell of a job, so that the program gets exactly this text.

    A reference such as `${{inputs.images}}` stands in double quotes: Azure ML writes a path there, or a variable that
    holds it. Nothing else in the result looks like a reference, to Azure ML or to azure-ai-ml.

    Args:
        argument: any text without a null character.
        references: what the argument may refer to, as `inputs.images`.

    Raises:
        JobError: the argument refers to an input, an output or a hyperparameter that the job does not have.
    """
    if "\0" in argument:
        raise JobError(f"The argument {argument!r} contains a null character, which no command line can hold.")
    check_references(argument, references)
    parts = REFERENCE.split(argument)  # text and names in turn
    quoted = [_quote_text(part) if number % 2 == 0 else f'"${{{{{part}}}}}"' for number, part in enumerate(parts)]
    return "".join(quoted) or "''"


def _quote_text(text: str) -> str:
    """Quote text for the shell; every `{` that could begin a reference ends a quoted part."""
    ends = [0, *(found.start() + 1 for found in _BRACKETS.finditer(text)), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(ends)]
    return "".join(shlex.quote(part) for part in parts if part)


def check_references(text: str, references: Collection[str]) -> None:
    """Check that each reference in a command or argument is one of these.

    Raises:
        JobError: one is not; the message names the near matches.
    """
    for written in _LOOKS_LIKE_REFERENCE.findall(text):
        found = REFERENCE.fullmatch(written)
        if found is None or found[1] not in references:
            known = [f"${{{{{each}}}}}" for each in references]
            near = near_matches(written, known) if known else "There is none."
            raise JobError(
                f"{written} refers to no input or output of this job. {near} An input is declared by --input "
                "NAME=PATH, an output by --output NAME."
            )


def hydra_text(text: str) -> str:
    """Quote any text as a value in Hydra's notation."""
    escaped = re.sub(r"(\\*)'", lambda found: f"{found[1]}{found[1]}\\'", text.replace("${", r"\${"))
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{escaped[len(escaped) - trailing :]}'"


@dataclass(frozen=True)
class Program:
    """What a job runs. Exactly one of the first four is given.

    Attributes:
        script: path of a Python file.
        module: name of a module, as for `python -m`.
        verb: a verb of `azureml-strategy`, such as `bench`.
        command: a command line for the shell of the job, passed on as it is.
        arguments: the arguments of the script, module or verb, each passed on exactly. `${{inputs.NAME}}`,
            `${{outputs.NAME}}` and `${{search_space.NAME}}` stand for the paths and values in the job.
    """

    script: str | None = None
    module: str | None = None
    verb: str | None = None
    command: str | None = None
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        """What the experiment and the job are named after."""
        if self.command is not None:
            scripts = re.findall(r"([\w-]+)\.py\b", self.command)
            return scripts[0] if scripts else re.split(r"\W", self.command.strip())[0] or "command"
        return Path(self.script).stem if self.script else str(self.module or self.verb).rpartition(".")[-1]


def program_of(words: Sequence[str]) -> Program:
    """The program that the words of a command run; `python train.py --lr 0.1` is a script with arguments."""
    if words[0] in ("python", "python3") and len(words) > 1:
        if words[1] == "-m" and len(words) > 2:
            return Program(module=words[2], arguments=words[3:])
        if words[1].endswith(".py"):
            return Program(script=words[1], arguments=words[2:])
    return Program(command=shlex.join(words))


@dataclass(frozen=True)
class ProgramData:
    """The data of a program, as the command line and `submit_script` take it.

    Attributes:
        inputs: path or value of each input: a data asset, an address, a folder or file here; any other text, a number
            or a truth value is a value.
        outputs: address of each output; None for a folder of the job's own.
    """

    inputs: Mapping[str, str | float] = field(default_factory=dict)
    outputs: Mapping[str, str | None] = field(default_factory=dict)


def plan_call(
    program: Program,
    cluster: str | None,
    num_nodes: int | None,
    overrides: Sequence[str],
    inputs: Mapping[str, str | float] | None,
    outputs: Mapping[str, str | None] | None,
    sweep: Sweep | None = None,
) -> JobPlan:
    """Plan the job of a program from the arguments of `submit_script`, `submit_command` or `render_script`."""
    size = [] if cluster is None else [f"cluster={cluster}"]
    nodes = [] if num_nodes is None else [f"cluster.num_nodes={num_nodes}"]
    return plan_program(program, [*size, *nodes, *overrides], ProgramData(inputs or {}, outputs or {}), sweep)


def plan_program(
    program: Program, overrides: Sequence[str], data: ProgramData | None = None, sweep: Sweep | None = None
) -> JobPlan:
    """Plan the job of a program.

    Args:
        program: what the job runs.
        overrides: settings of `cluster` and `job`, in Hydra's notation, as for a recipe.
        data: inputs and outputs.
        sweep: a search over options of the program. An option that no argument refers to is added: `--lr VALUE`.

    Raises:
        JobError: the program, a setting or an input is invalid, or one of them holds a secret. Nothing was sent.
    """
    data = data or ProgramData()
    check_words(overrides)
    cluster, job = _settings([*_data_overrides(data), *overrides])
    if program.verb is not None:
        job = replace(job, outputs={})
    code = _code_folder(program, job)
    job, environment_notes = _with_environment(program, code, job)
    names = [parameter.name for parameter in sweep.parameters] if sweep else []
    command = _command(_with_trial_options(program, sweep), code, job, names)
    refuse_secrets(_argument_texts(program))
    refuse_secret_settings(job)
    variables, checkpoint_notes = _checkpoint(program, cluster, job)
    variables |= _python_path(code, job)
    cluster, process_notes = _with_processes(program, cluster, job)
    return JobPlan(
        name=program.name,
        command=command,
        cluster=cluster,
        job=job,
        code=code,
        needs=_in_code(program.script, code) if program.script and code else None,
        tags={"program": program.name},
        variables=variables,
        notes=[*environment_notes, *checkpoint_notes, *process_notes, *(sweep.warnings() if sweep else ())],
        sweep=sweep,
    )


def _with_trial_options(program: Program, sweep: Sweep | None) -> Program:
    """Add an option for each hyperparameter that the program's words do not refer to."""
    if sweep is None:
        return program
    if any(parameter.kind == AUTOTUNING for parameter in sweep.parameters):
        raise JobError("--sweep autotuning reads a recipe's strategy. For a program, name its options: --sweep lr=...")
    words = program.command or " ".join(program.arguments)
    named = {reference.partition(".")[2] for reference in REFERENCE.findall(words) if reference.startswith("search")}
    missing = [parameter for parameter in sweep.parameters if parameter.name not in named]
    if missing and program.command is not None:
        raise JobError(
            f"--sweep varies {missing[0].key}, and the command does not say where it goes. Write "
            f"'${{{{search_space.{missing[0].name}}}}}' into it."
        )
    options = [f"--{each.key}=${{{{search_space.{each.name}}}}}" for each in missing]
    return replace(program, arguments=[*program.arguments, *options])


def _settings(overrides: Sequence[str]) -> tuple[ClusterSettings, JobSettings]:
    try:
        config = compose_settings(overrides)
    except RecipeError as error:
        raise JobError(
            f"{error} The job of a script or command has the settings `cluster` and `job`; the program's own arguments "
            "stand after `--`."
        ) from error
    cluster, job = read_section(config, "cluster", ClusterSettings), read_section(config, "job", JobSettings)
    keys = {f"inputs.{name}": each.sets for name, each in job.inputs.items()}
    keys |= {f"outputs.{name}": each.sets for name, each in job.outputs.items()}
    for place, key in keys.items():
        if key is not None and (place, key) != ("outputs.run", "output_dir"):  # the default output, for recipes
            raise JobError(
                f"job.{place}.sets is {key}, a key of a recipe, and this job runs a program. Write '${{{{{place}}}}}' "
                "among its arguments."
            )
    outputs = {name: replace(each, sets=None) for name, each in job.outputs.items()}
    return cluster, replace(job, outputs=outputs)


def _data_overrides(data: ProgramData) -> list[str]:
    """The inputs and outputs as overrides, so that later ones such as `job.inputs.images.mode=download` can follow."""
    words = []
    for name, given in data.inputs.items():
        shown = _input_settings(name, given)
        kind = "null" if shown.value is None else hydra_text(shown.value) if isinstance(shown.value, str) else given
        path = "null" if shown.path is None else hydra_text(shown.path)
        rest = f"type: {shown.type}, mode: {shown.mode}, access: {shown.access}, sets: null"
        words.append(f"+job.inputs.{name}={{value: {kind}, path: {path}, {rest}}}")
    for name, where in data.outputs.items():
        path = "null" if where is None else hydra_text(where)
        default = OutputSettings()
        add = "" if name == "run" else "+"
        words.append(
            f"{add}job.outputs.{name}={{path: {path}, type: {default.type}, mode: {default.mode}, sets: null}}"
        )
    return words


def _input_settings(name: str, given: str | float) -> InputSettings:
    """Tell data from values. A file or a folder is told by its address; the type of an asset is not known here."""
    if not isinstance(given, str):
        return InputSettings(value=given)
    if _URL.match(given):
        is_file = not given.startswith("azureml:") and Path(given.partition("?")[0]).suffix != ""
        return InputSettings(path=given, type="uri_file" if is_file else "uri_folder")
    if os.path.exists(given):
        return InputSettings(path=given, type="uri_folder" if os.path.isdir(given) else "uri_file")
    if os.sep in given and given.startswith((".", "~", os.sep)):
        raise JobError(
            f"--input {name}={given} looks like a path, but nothing is there. Upload it first (`azureml-strategy data "
            "upload`), or name a data asset, azureml:NAME@latest, or an address, azureml://datastores/..."
        )
    return InputSettings(value=_literal(given))


def _literal(text: str) -> str | float:
    """A number, if Azure ML would read the YAML text as one; else the text."""
    for kind in (int, float):
        try:
            number: float = kind(text)
        except ValueError:
            continue
        return number if str(number) == text else text
    return text


def _code_folder(program: Program, job: JobSettings) -> str | None:
    """The folder of code: `job.code`, else the git work tree, else the folder of the script or the current one."""
    if program.verb is not None or job.code == NO_CODE:
        return None
    if program.script is not None and not os.path.isfile(program.script):
        near = near_matches(program.script, [each for each in os.listdir() if each.endswith(".py")])
        raise JobError(f"There is no script {program.script}. {near}".rstrip())
    if job.code is not None:
        return check_code(job.code)
    start = Path(program.script).resolve().parent if program.script else Path.cwd()
    work_tree = next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)
    # A home folder that is a work tree as a whole is nobody's project.
    return os.path.relpath(start if work_tree in (Path.home().resolve(), Path("/")) else work_tree)


def _command(program: Program, code: str | None, job: JobSettings, search_space: Iterable[str]) -> str:
    references = [f"inputs.{name}" for name in job.inputs] + [f"outputs.{name}" for name in job.outputs]
    references += [f"search_space.{name}" for name in search_space]
    folder = _folder_in_code(code)
    enter = f"cd {shlex.quote(folder)} && " if folder not in (None, os.curdir) else ""
    if program.command is not None:
        if not program.command.strip():
            raise JobError("The command is empty. Give what the job's shell runs: --command 'python train.py'.")
        check_references(program.command, references)
        return enter + program.command
    for argument in program.arguments:
        _refuse_shell_values(argument, job.inputs)
    if program.script is not None:
        words = ["python", _in_code(program.script, code, folder)]
    else:
        words = ["python", "-m", program.module] if program.module else ["azureml-strategy", str(program.verb)]
    return enter + " ".join(
        [*map(shlex.quote, words), *(quote_argument(each, references) for each in program.arguments)]
    )


def _with_environment(program: Program, code: str | None, job: JobSettings) -> tuple[JobSettings, list[str]]:
    """Take the environment from the file beside the program, if nothing else is chosen, and say so."""
    chosen = job.environment
    if program.verb is not None:
        return job, []
    if not (chosen.name or chosen.image or chosen.build or chosen.file):
        beside = [os.path.dirname(program.script) or os.curdir] if program.script else []
        folders = dict.fromkeys(map(os.path.relpath, [*beside, *([code] if code else [])]))
        chosen = replace(chosen, file=find_environment_file(list(folders)))
    try:
        note = describe_environment(chosen, code)
    except JobError as error:
        if job.environment.file:
            raise
        raise JobError(
            f"{error} It lies beside the program; job.environment.file=none takes our image alone."
        ) from error
    return replace(job, environment=chosen), [note]


def _python_path(code: str | None, job: JobSettings) -> dict[str, str]:
    """Let the program import the project of a pyproject.toml, which is not installed in the image."""
    file = job.environment.file
    if code is None or file is None or os.path.basename(file) != "pyproject.toml":
        return {}
    project = os.path.dirname(os.path.realpath(file))
    sources = os.path.join(project, "src")
    start = os.path.join(os.path.realpath(code), _folder_in_code(code) or os.curdir)
    return {"PYTHONPATH": os.path.relpath(sources if os.path.isdir(sources) else project, start)}


def _folder_in_code(code: str | None) -> str | None:
    """The path of the current folder in the folder of code; None if it is outside. The program runs there, as here."""
    if code is None:
        return None
    folder = os.path.relpath(os.path.realpath(os.curdir), os.path.realpath(code))
    return None if folder.split(os.sep)[0] == os.pardir else folder


def _in_code(script: str, code: str | None, folder: str | None = None) -> str:
    """The path of the script in the folder of code, from one of its folders.

    Raises:
        JobError: the script lies outside.
    """
    path = os.path.relpath(os.path.realpath(script), os.path.realpath(code or os.curdir))
    if code is None or path.split(os.sep)[0] == os.pardir:
        raise JobError(
            f"The script {script} lies outside of {code or 'the code, of which the job gets none'}, which is all that "
            "the job gets. Name a folder above it: job.code=FOLDER."
        )
    inside = os.path.relpath(path, folder or os.curdir)
    return f"./{inside}" if inside.startswith("-") else inside


def _refuse_shell_values(argument: str, inputs: Mapping[str, InputSettings]) -> None:
    """Azure ML writes a value into the command as it is: refuse one that the shell would read."""
    for reference in REFERENCE.findall(argument):
        given = inputs.get(reference.removeprefix("inputs."))
        if given is not None and isinstance(given.value, str) and _SHELL_READS.search(given.value):
            raise JobError(
                f"{reference} is {given.value!r}, which the job's shell would read as code. Give it as an argument in "
                "place of an input: arguments after `--` reach the program exactly."
            )


def _argument_texts(program: Program) -> dict[str, str]:
    """The command, and the arguments by the option before them: `--api-key abc` and `--api-key=abc` alike."""
    texts = {} if program.command is None else {"the command": program.command}
    option = ""
    for number, argument in enumerate(program.arguments):
        name, equals, value = argument.partition("=")
        if equals and name.startswith("-"):
            texts[f"the argument {name.lstrip('-')}"] = value
        else:
            texts[f"the argument {option or number + 1}"] = argument
        option = argument.lstrip("-") if argument.startswith("-") and not equals else ""
    return texts


def _checkpoint(program: Program, cluster: ClusterSettings, job: JobSettings) -> tuple[dict[str, str], list[str]]:
    """The variable by which each Trainer of the job saves and resumes, and a line about it."""
    preemptible = cluster.tier == "low_priority" and not job.plain and program.verb is None
    chosen = job.checkpoint or ("auto" if preemptible else "off")
    check_choice("job.checkpoint", chosen, _CHECKPOINTS)
    if chosen == "off":
        return {}, []
    if "run" not in job.outputs:
        raise JobError(
            f"job.checkpoint={chosen} needs a folder that outlives the node, and the job has no output `run`. Add "
            "--output run, or set job.checkpoint=off."
        )
    why = ", as its nodes may be taken away (job.checkpoint=off: it does not)" if job.checkpoint is None else ""
    return {CHECKPOINT_SWITCH: chosen}, [f"checkpoints: a Lightning Trainer saves to the output run and resumes{why}"]


def _with_processes(program: Program, cluster: ClusterSettings, job: JobSettings) -> tuple[ClusterSettings, list[str]]:
    """Start one process on each node for a program that starts the others, and for `doctor`, which reads a node."""
    text = program.command or program.module or ""
    starter = next((each for each in _STARTERS if re.search(rf"(?<![\w.-]){re.escape(each)}(?![\w.-])", text)), None)
    asked = cluster.processes_per_node is not None or job.distribution not in ("pytorch", "mpi")
    if asked or (starter is None and program.verb != "doctor"):
        return cluster, []
    notes = [f"processes: one on each node, since {starter} starts the others"] if starter else []
    return replace(cluster, processes_per_node=1), notes
