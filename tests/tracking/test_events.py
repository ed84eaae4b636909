import json
from pathlib import Path

from lightning.pytorch import Trainer
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking import JobMLFlowLogger
from azureml_strategy.tracking.events import Event, EventLog, record_event


def test_events_are_an_artifact_of_the_run(tmp_path):
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    logger = JobMLFlowLogger(tracking_uri=store, artifact_location=(tmp_path / "files").as_uri(), folder=tmp_path)
    trainer = Trainer(logger=logger, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path)

    record_event(trainer, "warning", "node-1: the GPU is hot")
    record_event(trainer, "stop", "SIGTERM")
    logger.finalize()

    file = MlflowClient(store).download_artifacts(logger.run_id, "events/attempt_0.jsonl", str(tmp_path))
    events = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    assert [(each["kind"], each["text"], each["step"]) for each in events] == [
        ("warning", "node-1: the GPU is hot", 0),
        ("stop", "SIGTERM", 0),
    ]


def test_of_too_many_events_the_first_and_the_last_stay():
    log = EventLog()
    for number in range(10_000):
        log.add(Event("warning", str(number), step=number))

    texts = [json.loads(line)["text"] for line in log.to_text().splitlines()]
    assert len(texts) == 401
    assert texts[0] == "0"
    assert texts[200] == "9,600 events between are left out, as there were too many."
    assert texts[-1] == "9999"
