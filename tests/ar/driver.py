"""Drives an engine and its worker step by step, without a loop, checking the page accounts."""

from genserve.ar.config import ArConfig
from genserve.ar.serve import assemble
from genserve.core.control import Done, Message, Run, Send
from genserve.core.models.attention.backend import PAGED, register
from genserve.core.models.loading import wrap_model
from genserve.core.models.tiny import make_tiny_model
from genserve.core.types import Abort, Submit


def tiny_parts(arch="llama", seed=0, model=None, **config):
    """Engine parts around a tiny random model; its plain twin is `make_tiny_model(arch, seed)`."""
    register()
    model = model if model is not None else make_tiny_model(arch, seed)
    model.set_attn_implementation(PAGED)
    config = {"kv_pool": "2MiB", "num_threads": 1, "max_running": 16, "budget_tokens": 64, **config}
    return assemble(ArConfig(model=arch, **config), wrap_model(model, name=arch))


class Driver:
    """`run(submits)` returns {request id: list of outputs}; `steps` keeps each step's arguments."""

    def __init__(self, parts):
        self.engine, self.worker = parts.controller, parts.worker
        self.outputs = {}
        self.steps = []

    def submit(self, *submits):
        for submit in submits:
            self.outputs.setdefault(submit.request_id, [])
            self.engine.observe(Message("test", submit), 0.0)

    def abort(self, request_id):
        self.engine.observe(Message("test", Abort(request_id)), 0.0)

    def decide(self):
        """The runs that the engine asks for now; what it sends is kept."""
        runs = []
        for effect in self.engine.decide(0.0):
            if isinstance(effect, Send):
                for output in effect.body:
                    self.outputs.setdefault(output.request_id, []).append(output)
            elif isinstance(effect, Run):
                runs.append(effect)
        return runs

    def step(self):
        """One round; False when the engine has nothing to run."""
        ran = False
        for run in self.decide():
            ran = True
            self.steps.append(run.args)
            result = self.worker.perform(run.op, run.args)
            self.engine.observe(Done(run.lane, run.run_id, result), 0.0)
        stats = self.engine.stats()
        assert stats["num_used_pages"] + stats["num_free_pages"] == stats["num_pages"]
        return ran

    def run(self, *submits):
        self.submit(*submits)
        while self.step():
            pass
        stats = self.engine.stats()
        assert stats["num_sequences"] == stats["num_leases"] == stats["num_used_pages"] == 0
        return self.outputs

    def tokens(self, request_id):
        return [token for output in self.outputs[request_id] for token in output.token_ids]


def submit(request_id, prompt, sampling, **options):
    return Submit(request_id, tuple(prompt), sampling, **options)
