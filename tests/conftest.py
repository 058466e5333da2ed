"""What holds for every test: one thread of arithmetic, one Ray session for the whole run, no hanging.

A test that stays silent longer than `faulthandler_timeout` (pyproject) ends the run with every
thread's stack.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--runslow"):
        slow = pytest.mark.skip(reason="takes minutes; run with --runslow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(slow)


@pytest.fixture(scope="session")
def ray_session():
    """The one Ray session of this run, started by the first test that asks for it."""
    import ray

    from genserve.core.runtime.ray_executor import ensure_ray

    ensure_ray(num_cpus=2)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of three layers with tokenizer and chat template, as a Hugging Face folder."""
    from genserve.core.models.tiny import make_tiny_folder

    return str(make_tiny_folder(tmp_path_factory.mktemp("models") / "tiny", "llama"))
