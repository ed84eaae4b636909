from __future__ import annotations

from azureml_strategy.network.transport.errors import UNKNOWN, ErrorLog, LogError


def error(text: str, name: str = "memlock") -> LogError:
    return LogError(name, text, "It means.", "Do this.", "problem")


def collect(*texts: str, name: str = "memlock") -> list[tuple[str, int]]:
    log = ErrorLog(lambda text: error(text, name))
    for text in texts:
        log.add(text)
    return [(kept.text, kept.count) for kept in log]


def test_an_error_reads_as_its_text() -> None:
    assert str(error("Call failed")) == "Call failed"


def test_errors_that_differ_in_numbers_are_one() -> None:
    assert collect("peer 10.0.0.4<51> at 0x7f", "peer 10.0.0.5<52> at 0xab") == [("peer 10.0.0.4<51> at 0x7f", 2)]


def test_a_kind_keeps_a_few_texts() -> None:
    texts = [f"peer {letter}" for letter in "abcdefg"]
    assert collect(*texts) == [
        *((text, 1) for text in texts[:4]),
        ("Further messages of this kind.", 3),
    ]


def test_a_million_kinds_do_not_fill_the_memory() -> None:
    letters = str.maketrans("0123456789", "abcdefghij")
    kept = collect(*(f"message {number}".translate(letters) for number in range(2000)), name=UNKNOWN)
    assert len(kept) == 33
    assert kept[-1] == ("Further messages of this kind.", 2000 - 32)


def test_a_text_is_short_and_without_secrets() -> None:
    ((text, _),) = collect("GET https://x.blob.core.windows.net/d?sig=abcSECRETdef&se=1 " + "x" * 5000)
    assert "SECRET" not in text
    assert len(text) <= 1024 + len("<redacted>")
