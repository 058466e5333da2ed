"""Receipts are read, refused and replayed; the command line makes images and makes them again."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from genserve.cli import app
from genserve.core.errors import ConfigError, InvalidRequest
from genserve.core.server.pictures import receipt_text
from genserve.t2i import receipt

DATA = {
    "version": 1,
    "workflow": "paint",
    "model": "painter",
    "inputs": {"prompt": "x", "seed": 5, "negative_prompt": None},
    "num_images": 3,
    "seeds": [5, 6, 7],
    "loras": [{"name": "dots", "scale": 0.5}],
    "lora_max_late_steps": 2,
    "lora_arrival_steps": [0, 1, 2],
    "nodes": {"encode": {"model": "abc"}, "decode": {"model": ""}},
    "outputs": [{"image": 0}, {"image": 1}, {"image": 2}],
}


def cli(*arguments: str, exit_code: int = 0):
    result = CliRunner().invoke(app, ["t2i", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == exit_code, result.output
    return result


def test_one_image_of_a_receipt_is_a_request_of_its_own():
    found = receipt.parse(json.dumps({"receipt": {**DATA, "image": 2}}))
    assert found.image == 2 and "image" not in found.data
    request = found.one_image(2).request("again")
    assert (request.workflow, request.num_images, request.inputs["seed"]) == ("paint", 1, 7)
    assert request.lora_arrival_steps == (2,) and request.lora_max_late_steps == 2
    assert [(lora.name, lora.scale) for lora in request.loras] == [("dots", 0.5)]
    assert "negative_prompt" not in request.inputs
    assert found.one_image(1).data["outputs"] == [{"image": 1}]
    assert found.request("all").num_images == 3
    with pytest.raises(ConfigError, match="3 images"):
        found.one_image(3)


def test_other_models_are_named():
    found = receipt.parse(json.dumps(DATA))
    assert found.other_models({"encode": "abc", "decode": "xyz"}) == []
    assert found.other_models({"encode": "abd"}) == ["encode: the receipt's model is abc, this one abd"]
    assert found.other_models({}) == ["encode: this workflow has no such node"]


def test_pictures_are_given_again_and_must_be_the_same():
    picture = Image.new("RGB", (4, 3), "red")
    data = {**DATA, "inputs": {"image": receipt.noted(picture)}}
    found = receipt.parse(json.dumps(data))
    assert list(found.pictures) == ["image"]
    assert found.request("x", {"image": picture}).inputs["image"] is picture
    for given, says in [
        ({}, "image: a picture of 4x3"),
        ({"image": Image.new("RGB", (4, 3))}, "image: is another"),
        ({"image": picture, "mask": picture}, "mask: the receipt has no such"),
    ]:
        with pytest.raises(InvalidRequest, match=says):
            found.request("x", given)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "no JSON"), ("[]", "no receipt"), ("{}", "no receipt"), (json.dumps({**DATA, "version": 9}), "9")],
)
def test_what_is_no_receipt_is_refused(text, says, tmp_path):
    file = tmp_path / "receipt.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        receipt.read(file)
    plain = tmp_path / "plain.png"
    Image.new("RGB", (4, 4)).save(plain)
    with pytest.raises(ConfigError, match="carries no receipt"):
        receipt.read(plain)


def test_differences_are_told_in_words():
    one, other = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "red")
    assert receipt.compared(one, other) == ""
    other.putpixel((0, 0), (250, 0, 0))
    assert receipt.compared(one, other) == "1 of 4 pixels differ, by 5 of 255 at most"
    assert "sizes" in receipt.compared(one, Image.new("RGB", (3, 2)))


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """Two images of one request with an adapter and a further pass, on the command line; a replay isn't told of it."""
    folder = tmp_path_factory.mktemp("made")
    lora = f"style={tiny.lora('sd3')}"
    model = ("--model", tiny("sd3"), "--lora-file", lora, "--set", "num_threads=1")
    done = cli(
        "generate", "a cat", "-o", str(folder / "cat.png"), *model, "-n", "2", "--seed", "3",
        "--steps", "2", "--lora", "style:0.5", "--json", "--set", "passes={cfg_split: {}}",
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert [image["seed"] for image in answer["images"]] == [3, 4]
    (folder / "receipt.json").write_text(json.dumps(answer["receipt"]))
    return folder, model


def test_an_image_is_replayed_from_its_file_and_from_json(made):
    folder, model = made
    done = cli("replay", str(folder / "cat-1.png"), *model, "--check", "-o", str(folder / "again.png"))
    assert done.stdout.strip() == "the image is the same"
    again, first = Image.open(folder / "again.png"), Image.open(folder / "cat-1.png")
    assert again.tobytes() == first.tobytes()
    assert cli("replay", str(folder / "receipt.json"), *model, "--check").stdout.count("is the same") == 2


def test_another_image_and_another_model_are_told(made, tiny):
    folder, model = made
    text = receipt_text((folder / "cat-1.png").read_bytes())
    assert text is not None
    data = json.loads(text)
    data["inputs"]["prompt"] = "a dog"
    changed = folder / "changed.json"
    changed.write_text(json.dumps(data))
    done = cli("replay", str(changed), *model, "--check", exit_code=1)
    assert "the image is another" in done.stdout
    other = list(model)
    other[other.index("--lora-file") + 1] = f"style={tiny.lora('sd3', seed=1)}"
    done = cli("replay", str(folder / "cat-1.png"), *other, exit_code=2)
    assert "not the models of the receipt" in done.output and "load_lora" in done.output
    done = cli("replay", str(folder / "cat-1.png"), "--model", tiny("sd3"), exit_code=2)
    assert "has an adapter 'style'" in done.output


def test_mistakes_on_the_command_line(made, tmp_path):
    _, model = made
    for arguments, says in [
        (("generate", "x", *model, "-o", "x.gif"), "must end in"),
        (("generate", "x", *model, "--size", "33x64", "-o", str(tmp_path / "x.png")), "size"),
        (
            ("generate", "x", *model, "--mask", "nowhere.png", "-o", str(tmp_path / "x.png")),
            "mask: cannot read",
        ),
        (("generate", "x", *model, "--lora", "other", "-o", str(tmp_path / "x.png")), "there is: style"),
        (("generate", "x", "--model", str(tmp_path)), "model_index.json"),
        (("replay", str(tmp_path / "none.json")), "cannot read"),
    ]:
        assert says in cli(*arguments, exit_code=2).output
