"""Server configuration from file, options and overrides, and what is said of mistakes."""

from pathlib import Path

import pytest

from genserve.core.errors import ConfigError
from genserve.server_config import model_entry, server_config


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("smollm2", {"model": "smollm2"}),
        ("ar:smollm2", {"family": "ar", "model": "smollm2"}),
        ("helper=ar:models/tuned", {"name": "helper", "family": "ar", "model": "models/tuned"}),
        ("helper=org/model", {"name": "helper", "model": "org/model"}),
        ("./a=b", {"model": "./a=b"}),
    ],
)
def test_model_arguments(text, entry):
    assert model_entry(text) == entry


def test_a_path_with_a_colon_is_a_path(tmp_path):
    folder = tmp_path / "x:y"
    folder.mkdir()
    assert model_entry(str(folder)) == {"model": str(folder)}


@pytest.mark.parametrize("text", ["", "ar:", "name=", "video:wan", "name=ray:x"])
def test_bad_model_arguments(text):
    with pytest.raises(ConfigError, match="--model"):
        model_entry(text)


def test_later_sources_win(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(
        "port: 1\nhost: 0.0.0.0\nmodels:\n- {model: a, kv_pool: 1GiB}\n- {model: b, dtype: float32}\n"
    )
    config = server_config(
        path,
        model_options={"kv_pool": "2GiB", "dtype": None},
        overrides=["models.1.kv_pool=3GiB", "drain_timeout_s=5"],
        port=2,
        host=None,
    )
    assert (config.port, config.host, config.drain_timeout_s) == (2, "0.0.0.0", 5)
    assert [(m.model, m.kv_pool >> 30, m.dtype) for m in config.models] == [
        ("a", 2, "auto"),
        ("b", 3, "float32"),
    ]
    assert [m.model for m in server_config(path, models=["c"]).models] == ["c"]


def test_a_model_tells_its_family(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LLaDAModelLM"]}')
    config = server_config(
        models=["tiny-llada", "tiny-llama", "smollm2", str(tmp_path), f"x=ar:{tmp_path}", "x/y"]
    )
    assert [model.family for model in config.models] == ["dllm", "ar", "ar", "dllm", "ar", "ar"]
    assert server_config(family="dllm", models=["a", "ar:b"]).models[0].family == "dllm"
    assert [m.model for m in server_config(family="dllm").models] == ["tiny-llada"]
    assert [m.model for m in server_config(family="t2i").models] == ["tiny-sd3"]
    (tmp_path / "model_index.json").write_text("{}")
    assert server_config(models=[str(tmp_path)]).models[0].family == "t2i"
    with pytest.raises(ConfigError, match="no family 'video'; there is: ar, dllm, t2i"):
        server_config(family="video")


def test_options_for_every_model_spare_image_models_what_they_lack():
    config = server_config(models=["t2i:a", "b"], model_options={"kv_pool": "1GiB", "executor": "ray"})
    assert [model.executor for model in config.models] == ["ray", "ray"]
    with pytest.raises(ConfigError, match=r"models\.0\.kv_pool: unknown key"):
        server_config(models=["t2i:a"], model_options={"kv_pool": "1GiB"})


def test_the_embedded_model_is_the_default_and_keys_are_hidden():
    config = server_config(api_keys=["hush"])
    assert [(m.family, m.model) for m in config.models] == [("ar", "tiny-llama")]
    assert "hush" not in config.model_dump_json() + repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "server.yaml: prot: unknown key"),
        ("models: [{model: a, kvpool: 1}]", "models.0.kvpool: unknown key"),
        ("models: [{model: a, kv_pool: lots}]", "models.0.kv_pool"),
        ("models: [{model: a, max_running: 0}]", "models.0.max_running"),
        ("models: [{model: a, family: video}]", "models.0: no such family; there is: ar, dllm, t2i"),
        ("models: [{model: a, family: dllm, threshold: 2}]", "models.0.threshold"),
        ("models: [a]", "models.0: no such family"),
        ("models: [{model: a}, {model: a}]", "two models are called a"),
        ("models: []", "at least one model"),
        ("models: 3", "models"),
        ("port: 99999", "port"),
        ("api_keys: ['']", "api_keys.0"),
        ("api_keys: [' ']", "api_keys.0"),
        ("max_body: 0", "max_body"),
        ("write_timeout_s: 0", "write_timeout_s"),
        ("body_timeout_s: .inf", "body_timeout_s"),
        ("[1]", "top level must be a mapping"),
        ("a: 1\nb: [", "is not YAML: line 2, column 5: "),
        ("a: 1\n\tb: 2", "is not YAML: line 2, column 1: "),
        ("models: []", "server.yaml: models: a server needs"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        server_config(path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_and_a_bad_override():
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.yaml"):
        server_config(Path("nowhere.yaml"))
    for override in ("port", "=1", "models.7.dtype=auto", "models.0.model.a=1", "port=[1"):
        with pytest.raises(ConfigError, match="--set"):
            server_config(overrides=[override])
