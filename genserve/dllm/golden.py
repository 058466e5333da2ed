"""Replays folders of recorded generations through the worker: `python -m genserve.dllm.golden DIR`.

All cases of a checkpoint run together in packed passes over real paged KV, or one by one (`--alone`).
The format is described in `tests/golden/README.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from genserve.core.models.attention.backend import PagedContext
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.dllm.denoise import Proposable, RowOptions, propose
from genserve.dllm.golden_cases import Inexpressible, Replay, recorded_noise, replay_of
from genserve.dllm.models.interface import DiffusionModel, LoadedDiffusionModel
from genserve.dllm.request import Unmasking
from genserve.dllm.slot import visible_ends
from genserve.dllm.step import STEP, StepArgs
from genserve.dllm.unmasking import Candidate, Share, choose
from genserve.dllm.worker import DllmWorker

PAGE_TOKENS = 16
LOGITS_TOLERANCE = 5e-4
LONG_LOGITS_TOLERANCE = 2e-3
SCORE_TOLERANCE = 2e-4


class Verdict(NamedTuple):
    """One case and what is wrong with it; nothing if it passed."""

    name: str
    differences: list[str]


def replay_folder(folder: Path, *, alone: bool = False) -> Iterator[Verdict]:
    """Verdicts on every case, sampler case and logits file of a folder in the format."""
    yield from _replay_cases(folder, alone)
    for path in sorted(folder.glob("sampler/*.json")):
        yield from _replay_sampler(path)
    for path in sorted(folder.glob("logits/*.safetensors")):
        yield _guarded(f"logits/{path.stem}", lambda path=path: _compare_logits(folder, path))


def _guarded(name: str, compare: Any) -> Verdict:
    """A case of a broken or foreign kind fails with the reason; the others go on."""
    try:
        return Verdict(name, compare())
    except KeyError as error:
        return Verdict(name, [f"the case has no field or tensor {error}"])
    except Exception as error:
        return Verdict(name, [f"{type(error).__name__}: {error}"])


def _load(folder: Path, mask_id: int) -> LoadedDiffusionModel:
    from genserve.dllm.models.registry import load_diffusion_model

    return load_diffusion_model(str(folder), dtype="float32", mask_token_id=mask_id)


# Whole generations.


def _replay_cases(folder: Path, alone: bool) -> Iterator[Verdict]:
    groups: dict[tuple[str, int, int | None], list[tuple[str, Replay]]] = {}
    for path in sorted(folder.glob("cases/*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        try:
            case = json.loads(path.read_text())
            replay = replay_of(case)
            key = (case["checkpoint"], case["mask_id"], replay.eos_id)
        except KeyError as error:
            yield Verdict(name, [f"the case has no field {error}"])
        except Inexpressible as error:
            yield Verdict(name, [f"cannot be replayed: {error}"])
        except Exception as error:
            yield Verdict(name, [f"cannot be replayed: {type(error).__name__}: {error}"])
        else:
            groups.setdefault(key, []).append((name, replay))
    models: dict[tuple[str, int], LoadedDiffusionModel] = {}
    for (checkpoint, mask_id, eos_id), members in groups.items():
        try:
            loaded = models.get((checkpoint, mask_id))
            if loaded is None:
                loaded = models[checkpoint, mask_id] = _load(folder / checkpoint, mask_id)
            batches = [[replay] for _, replay in members] if alone else [[replay for _, replay in members]]
            for replays in batches:
                _run(loaded, replays, eos_id)
        except Exception as error:
            yield from (Verdict(name, [f"{type(error).__name__}: {error}"]) for name, _ in members)
            continue
        for name, replay in members:
            yield _guarded(name, lambda replay=replay, mask_id=mask_id: replay.differences(mask_id))


def _run(loaded: LoadedDiffusionModel, replays: Sequence[Replay], fill_token_id: int | None) -> None:
    """Denoise them all, every step one packed pass of those that are not at their end."""
    num_pages = sum(replay.num_pages for replay in replays)
    backend = CpuAttention(loaded.model.layer_specs, num_pages, torch.float32)
    worker = DllmWorker(
        loaded,
        backend,
        len(replays),
        max(replay.num_pages for replay in replays),
        noise=recorded_noise(replays),
        fill_token_id=fill_token_id,
    )
    pages: list[range] = []
    for slot, replay in enumerate(replays):
        replay.slot = slot
        first = pages[-1].stop if pages else 0
        pages.append(range(first, first + replay.num_pages))
    admits = tuple(replay.admit() for replay in replays)
    while running := [replay for replay in replays if not replay.ended]:
        passes = tuple(replay.next(pages[replay.slot]) for replay in running)
        result = worker.perform(STEP, StepArgs((), admits, passes))
        admits = ()
        for replay, denoised in zip(running, result.denoised, strict=True):
            replay.took(denoised)


# Commit decisions on given logits.


def _replay_sampler(path: Path) -> Iterator[Verdict]:
    from safetensors.torch import load_file

    name = f"sampler/{path.stem}"
    try:
        data = json.loads(path.read_text())
        tensors = load_file(path.parent / "logits.safetensors")
        decide = {"llada": _decide_llada, "dream": _decide_dream, "llada2": _decide_llada2}[path.stem]
        allowed = Proposable(data["vocab"], data["mask_id"])
        cases = data["cases"]
    except Exception as error:
        yield Verdict(name, [f"{type(error).__name__}: {error}"])
        return
    for at, case in enumerate(cases):
        yield _guarded(
            f"{name}[{at}]",
            lambda case=case: decide(case, tensors[case["logits"]].float(), allowed, data["mask_id"]),
        )


def _candidates(
    logits_RV: torch.Tensor, positions: Sequence[int], allowed: Proposable
) -> tuple[dict[int, int], list[Candidate]]:
    if not positions:
        return {}, []
    rows = logits_RV[torch.tensor(positions)]
    found = propose(rows, [RowOptions()] * len(positions), allowed, with_margin=True, with_entropy=True)
    scored = zip(positions, found.confidences, found.margins, found.entropies, strict=True)
    return dict(zip(positions, found.token_ids, strict=True)), [Candidate(*each) for each in scored]


def _differ(case: dict[str, Any], positions: list[int], tokens: dict[int, int]) -> list[str]:
    got = {"pos": positions, "tok": [tokens[position] for position in positions]}
    return [f"{key} {got[key]} instead of {case[key]}" for key in got if got[key] != case[key]]


def _decide_llada(case: dict[str, Any], logits_RV: Any, allowed: Proposable, mask_id: int) -> list[str]:
    strategy = case["strategy"]
    kind = strategy["kind"]
    if kind == "threshold":
        rule, due = Unmasking("threshold", threshold=strategy["threshold"]), Share()
    elif kind == "factor":
        rule, due = Unmasking("factor", factor=strategy["factor"], factor_rule=strategy["rule"]), Share()
    elif kind == "quota":
        rule, due = Unmasking("quota"), Share(strategy["k"])
    else:
        raise Inexpressible(f"strategy kind {kind!r}")
    tokens, candidates = _candidates(logits_RV, case["masked"], allowed)
    return _differ(case, choose(rule, due, candidates), tokens)


def _decide_dream(case: dict[str, Any], logits_RV: Any, allowed: Proposable, mask_id: int) -> list[str]:
    alg = case["strategy"]["alg"]
    kinds: dict[str, Any] = {"maskgit_plus": "quota", "topk_margin": "margin", "entropy": "entropy"}
    tokens, candidates = _candidates(logits_RV, case["masked"], allowed)
    scores = {
        "maskgit_plus": [each.confidence for each in candidates],
        "topk_margin": [each.margin for each in candidates],
        "entropy": [-each.entropy for each in candidates],
    }[alg]
    off = max((abs(a - b) for a, b in zip(scores, case["score"], strict=True)), default=0.0)
    wrong = [f"score off by {off:.1e}"] if off > SCORE_TOLERANCE else []
    chosen = choose(Unmasking(kinds[alg]), Share(case["strategy"]["k"]), candidates)
    return wrong + _differ(case, chosen, tokens)


def _decide_llada2(case: dict[str, Any], logits_RV: Any, allowed: Proposable, mask_id: int) -> list[str]:
    strategy, block = case["strategy"], case["block"]
    rule = Unmasking("threshold", threshold=strategy["threshold"], strict=True, min_commits=strategy["quota"])
    masked = [at for at, token in enumerate(block) if token == mask_id]
    tokens, candidates = _candidates(logits_RV, range(len(block)), allowed)
    chosen = choose(rule, Share(), [each for each in candidates if each.position in masked])
    edited = []
    if strategy["editing_threshold"] is not None:
        edited = [
            each.position
            for each in candidates[case["prompt_positions"] :]
            if each.position not in masked
            and tokens[each.position] != block[each.position]
            and each.confidence > strategy["editing_threshold"]
        ]
    wrong = [] if edited == case["edited"] else [f"edited {edited} instead of {case['edited']}"]
    return wrong + _differ(case, sorted(chosen + edited), tokens)


# Raw logits of single passes.


def _compare_logits(folder: Path, path: Path) -> list[str]:
    from safetensors.torch import load_file

    want = load_file(path)
    # The mask token only says what is never proposed; these are raw logits.
    loaded = _load(folder / "checkpoints" / path.stem, 0)
    block_length = int(want["block_length"]) if "block_length" in want else None
    model = cast(DiffusionModel, loaded.model)
    length = max(len(want["ids"]), len(want.get("long_ids", ())))
    num_pages = -(-length // PAGE_TOKENS)
    backend = CpuAttention(loaded.model.layer_specs, num_pages, torch.float32)
    table = np.arange(num_pages, dtype=np.int32)[None]

    def rows(ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
        ends = visible_ends(np.arange(start, end), len(ids), block_length)
        batch = PagedBatch.pack([(0, start, end - start)], table, ends)
        with torch.inference_mode():
            hidden = model.hidden(
                ids[start:end].long(),
                torch.from_numpy(batch.positions_T),
                PagedContext(backend, batch),
            )
            return model.logits(hidden).float()

    found = {}
    ids = want["ids"]
    found["logits"] = rows(ids, 0, len(ids))
    if "start" in want:
        start, end = int(want["start"]), int(want["end"])
        for cache, stop in (("prefix", len(ids)), ("dual", end)):
            rows(ids, 0, len(ids))
            for number in (1, 2):
                found[f"{cache}{number}_logits"] = rows(want[f"ids{number}"], start, stop)
    if "long_ids" in want:
        long_ids = want["long_ids"]
        found["long_logits"] = rows(long_ids, 0, len(long_ids))[want["long_rows"].long()]
    wrong = []
    for name, logits in found.items():
        off = float((logits - want[name].float()).abs().max())
        if not off <= (LONG_LOGITS_TOLERANCE if name == "long_logits" else LOGITS_TOLERANCE):
            wrong.append(f"{name} off by {off:.1e}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the failures and `N passed, M failed`; 1 if anything failed or there was nothing to replay."""
    parser = argparse.ArgumentParser(
        prog="python -m genserve.dllm.golden",
        description="Replay recorded generations (cases/, sampler/, logits/, checkpoints/) through the "
        "diffusion worker and compare every pass: positions, tokens, confidences, passes, final sequence.",
    )
    parser.add_argument("folder", type=Path, help="a folder in the format of tests/golden/README.md")
    parser.add_argument("--alone", action="store_true", help="one case at a time instead of packed together")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"{options.folder} is not a folder", file=sys.stderr)
        return 1
    passed = failed = 0
    for verdict in replay_folder(options.folder, alone=options.alone):
        if verdict.differences:
            failed += 1
            print(f"FAILED {verdict.name}: {'; '.join(verdict.differences[:3])}", flush=True)
        else:
            passed += 1
    if not passed and not failed:
        print(
            f"{options.folder} has no cases/*/*.json, sampler/*.json or logits/*.safetensors", file=sys.stderr
        )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
