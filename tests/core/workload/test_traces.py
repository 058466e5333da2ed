"""Trace readers, on small files of each format, good and bad."""

import gzip
import json

import pytest

from genserve.core.errors import ConfigError
from genserve.core.workload.presets import open_workload
from genserve.core.workload.spec import synthesize_prompt
from genserve.core.workload.traces import (
    read_azure,
    read_lengths,
    read_mooncake,
    read_servegen,
    trace_format,
)
from genserve.core.workload.workload import Workload

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def write(path, text):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def mooncake_lines(*rows):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azure(tmp_path, name):
    path = write(tmp_path / name, AZURE)
    assert trace_format(path) == "azure"
    first, second = read_azure(path).requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert open_workload(path, 1).requests == (first,)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:16:00,12,x", "line 4, column GeneratedTokens: expected a number >= 0, got 'x'"),
        ("2023-11-16 18:16:00,-3,5", "line 4, column ContextTokens: .*'-3'"),
        ("2023-11-16 18:16:00,1.5,5", "line 4, column ContextTokens: expected a whole number >= 1"),
        ("2023-11-16 18:16:00,0,5", "line 4, column ContextTokens: expected a whole number >= 1"),
        ("2023-11-16 18:16:00,nan,5", "line 4, column ContextTokens"),
        ("yesterday,5,5", "line 4, column TIMESTAMP: expected a date and time, got 'yesterday'"),
        ("2023-11-16 18:16:00+00:00,5,5", "line 4, column TIMESTAMP"),
        ("2023-11-16 18:00:00,5,5", "line 4, column TIMESTAMP: is earlier"),
        ("2023-11-16 18:16:00,5", "line 4, column GeneratedTokens: expected 3 cells, got 2"),
        ("2023-11-16 18:16:00,5,5,5", "line 4, column GeneratedTokens: expected 3 cells, got 4"),
    ],
)
def test_bad_azure_rows_name_file_line_and_column(tmp_path, row, message):
    path = write(tmp_path / "bad.csv", AZURE + row + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_azure(path)
    assert str(error.value).startswith(str(path))


def test_mooncake_spreads_quantised_arrivals_and_keeps_sharing(tmp_path):
    rows = [(bin_ms, 700, 5, [0, index]) for bin_ms in (0, 3000, 6000) for index in range(40)]
    path = write(tmp_path / "m.jsonl.gz", mooncake_lines(*rows))
    assert trace_format(path) == "mooncake"
    workload = read_mooncake(path, seed=1)
    arrivals = [r.arrival_s for r in workload.requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 120
    assert 7 < arrivals[-1] < 9.1
    assert workload == read_mooncake(path, seed=1)
    assert workload != read_mooncake(path, seed=2)
    assert {r.arrival_s for r in read_mooncake(path, spread_bins=False).requests} == {0.0, 3.0, 6.0}
    same, other, again = (synthesize_prompt(workload.requests[i], 50_000) for i in (0, 1, 40))
    assert same[:512] == other[:512]
    assert same[512:] != other[512:]
    assert same == again


def test_mooncake_does_not_spread_over_a_silence(tmp_path):
    rows = [(ms, 10, 1, [0]) for ms in (0, 3000, 6000, 6000, 6000, 900_000, 903_000)]
    workload = read_mooncake(write(tmp_path / "m.jsonl", mooncake_lines(*rows)))
    assert not any(9.1 < r.arrival_s < 890 for r in workload.requests)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2, column 2: not JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}', "line 2, column hash_ids"),
        (mooncake_lines((1, 5, 1, [0, "a"])), "line 2, column hash_ids: expected a list of integers"),
        (mooncake_lines((1, 512, 1, [0, 1])), "line 2, column hash_ids: 2 blocks"),
        (mooncake_lines((1, None, 1, [0])), "line 2, column input_length: expected a number >= 0, got None"),
        (mooncake_lines((-1, 5, 1, [0])), "line 2, column timestamp"),
        (mooncake_lines((True, 5, 1, [0])), "line 2, column timestamp"),
    ],
)
def test_bad_mooncake_rows_name_file_line_and_column(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", mooncake_lines((0, 5, 1, [0])) + line)
    with pytest.raises(ConfigError, match=message):
        read_mooncake(path)


def test_length_table(tmp_path):
    path = write(
        tmp_path / "l.csv",
        "num_prefill_tokens,num_decode_tokens,pd_ratio\n100,20,5\n30.0,3,10\n",
    )
    assert trace_format(path) == "lengths"
    assert read_lengths(path).pairs == ((100, 20), (30, 3))
    workload = open_workload(path, 50)
    assert len(workload.requests) == 50
    assert {r.num_prompt_tokens for r in workload.requests} == {100, 30}
    write(path, "num_prefill_tokens,num_decode_tokens\n100,\n")
    with pytest.raises(ConfigError, match="line 2, column num_decode_tokens"):
        read_lengths(path)


ARRIVALS = (
    "client_id,window_start_s,rate_per_s,cv,dist,p1,p2\n"
    "0,0,2.0,3.0,Gamma,0.111,1.0\n"
    "0,600,4.0,3.0,Gamma,0.2,1.0\n"
    "4,600,1.0,1.0,Weibull,1.0,1.0\n"
)


def length_line(client, window_s, field, pdf):
    return json.dumps({"client_id": client, "window_start_s": window_s, "field": field, "pdf": pdf}) + "\n"


def test_servegen_clients_windows_and_lengths(tmp_path):
    arrivals = write(tmp_path / "servegen_x_arrivals.csv.gz", ARRIVALS)
    lengths = write(
        tmp_path / "servegen_x_lengths.jsonl.gz",
        length_line(0, 0, "input_tokens", {"50": 1.0})
        + length_line(0, 0, "output_tokens", {"7": 0.5, "0": 0.5})
        + length_line(0, 21600, "input_tokens", {})
        + length_line(4, 0, "input_tokens", {"900": 1.0})
        + length_line(4, 0, "reason_ratio", {"0.5": 1.0}),
    )
    clients = read_servegen(arrivals, lengths, duration_s=1200.0)
    assert clients.client_ids == (0, 4)
    workload = Workload.generate(clients.arrivals, clients.lengths, seed=0, duration_s=1200.0)
    late = [r for r in workload.requests if r.kind == "client-1"]
    assert {r.num_prompt_tokens for r in workload.requests if r.kind == "client-0"} == {50}
    assert {r.num_output_tokens for r in late} == {1, 7}  # client 4 has no output lengths of its own
    assert {r.num_prompt_tokens for r in late} == {900}
    assert len(late) == pytest.approx(600, rel=0.15)
    assert len(workload.requests) == pytest.approx(2 * 600 + 5 * 600, rel=0.3)
    assert {r.kind for r in open_workload(arrivals, 3000).requests} == {"client-0", "client-4"}


def test_servegen_pooled_lengths_and_errors(tmp_path):
    arrivals = write(tmp_path / "servegen_x_arrivals.csv", ARRIVALS)
    with pytest.raises(ConfigError, match="no lengths file"):
        open_workload(arrivals)
    lengths = write(
        tmp_path / "servegen_x_day0_pooled_lengths.csv",
        "field,tokens,prob\ninput_tokens,9,1.0\noutput_tokens,3,1.0\n",
    )
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in open_workload(arrivals, 20).requests} == {
        (9, 3)
    }
    with pytest.raises(ConfigError, match="no client is active"):
        read_servegen(arrivals, lengths, start_s=9000.0)
    with pytest.raises(ConfigError, match="'text_tokens', only of input_tokens, output_tokens"):
        read_servegen(arrivals, lengths, prompt_field="text_tokens")
    write(arrivals, ARRIVALS + "5,0,1.0,1.0,Pareto,1,1\n")
    with pytest.raises(ConfigError, match="line 5, column dist: expected Gamma or Weibull, got 'Pareto'"):
        read_servegen(arrivals, lengths)


def test_unknown_unreadable_and_truncated_files(tmp_path):
    with pytest.raises(ConfigError, match="line 1: not a known trace"):
        trace_format(write(tmp_path / "x.csv", "a,b\n1,2\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_azure(tmp_path / "absent.csv")
    whole = gzip.compress(AZURE.encode() * 50)
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut.csv.gz: cannot be read"):
        read_azure(tmp_path / "cut.csv.gz")
    with pytest.raises(ConfigError, match="has no requests"):
        read_azure(write(tmp_path / "empty.csv", AZURE.splitlines()[0] + "\n"))
