"""A backend that says again what it is told: as little as a backend can be."""

from cllm.backend import ModelSpec, OnProgress, Probe, StepModel
from cllm.errors import LoadAborted
from cllm.testing.scripted import ScriptedModel


class EchoBackend:
    contract_version = 1  # that it was written to
    knows_models = True  # its models are no files

    def probe(self) -> Probe:
        return Probe(available=True, reason="says again what it is told")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        if not on_progress(1.0):
            raise LoadAborted("the load was asked to stop")
        return ScriptedModel(lambda prompt: prompt.split("<turn>user\n")[-1].partition("<end>")[0], n_rows_max=spec.n_rows_max)
