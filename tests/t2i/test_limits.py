"""What a family can make, and what of a request is wrong or has no effect."""

from __future__ import annotations

import subprocess
import sys

import pytest

from genserve.core.errors import InvalidRequest
from genserve.t2i.workflows import FAMILIES, check, family_of, limits


@pytest.mark.parametrize(
    ("family", "step", "maximum"), [("sd15", 8, 256), ("sdxl", 8, 256), ("sd3", 16, 512), ("flux", 16, 4096)]
)
def test_limits_of_sizes(tiny, family, step, maximum):
    assert family_of(tiny(family)) == family
    found = limits(family, tiny(family))
    assert found["height"] == found["width"] == {"minimum": step, "maximum": maximum, "multiple_of": step}
    assert found["num_steps"]["maximum"] == 1000
    assert ("max_sequence_length" in found) == (family in ("sd3", "flux"))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_within_the_limits(tiny, family):
    found = limits(family, tiny(family))
    for each in FAMILIES[family](tiny(family), mode="inpaint").to_graph().inputs:
        bounds = found.get(each.name, {})
        if isinstance(each.default, int | float):
            assert bounds.get("minimum", 0) <= each.default <= bounds.get("maximum", each.default)
            assert each.default % bounds.get("multiple_of", each.default or 1) == 0


def test_the_largest_size_is_one_that_the_positions_reach(tiny):
    import diffusers

    net = diffusers.SD3Transformer2DModel.from_pretrained(tiny("sd3"), subfolder="transformer")
    side = limits("sd3", tiny("sd3"))["height"]["maximum"] // 8
    assert net.pos_embed.cropped_pos_embed(side, side).shape[1] == (side // 2) ** 2
    with pytest.raises(ValueError, match="Height"):
        net.pos_embed.cropped_pos_embed(side + 2, side)


def test_what_is_wrong_together(tiny):
    def fields(family, **inputs):
        return [error.field for error in check(family, tiny(family), inputs)[0]]

    assert fields("sd3", num_steps=4, strength=0.1) == []
    assert fields("sd3", num_steps=4, strength=0.0) == ["strength"]
    assert fields("sd15", num_steps=4, strength=0.2) == ["strength"]
    assert fields("sd3", num_steps=4, strength=0.6, control_start=0.0, control_end=1.0) == []
    assert fields("sd3", control_start=0.7, control_end=0.2) == ["control_start"]
    assert fields("sd3", scheduler={"name": "PNDMScheduler"}) == ["scheduler.name"]
    assert fields("sd15", scheduler={"name": "PNDMScheduler"}) == []
    assert fields("sd15", scheduler="euler") == ["scheduler"]


def test_what_has_no_effect(tiny):
    def warnings(family, **inputs):
        return check(family, tiny(family), inputs)[1]

    (warning,) = warnings("sd3", negative_prompt="blurry", guidance_scale=1.0)
    assert "negative_prompt has no effect" in warning and "guidance_scale is 1" in warning
    assert warnings("sd3", negative_prompt="blurry", guidance_scale=3.0) == ()
    assert warnings("sd3", negative_prompt="", guidance_scale=1.0) == ()
    (warning,) = warnings("flux", negative_prompt="blurry", true_cfg_scale=1.0, guidance_scale=3.5)
    assert "true_cfg_scale" in warning
    assert len(warnings("sd3", conditioning_scale=0.0)) == 1


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="model_index"):
        family_of(str(tmp_path))


def test_writing_workflows_needs_no_torch(tiny):
    code = (
        "import sys\nfrom genserve.t2i.workflows import flux, limits, check\n"
        f"flux({tiny('flux')!r}).to_graph(); limits('flux', {tiny('flux')!r})\n"
        f"check('flux', {tiny('flux')!r}, {{'strength': 0.5, 'num_steps': 3}})\n"
        "assert 'torch' not in sys.modules and 'diffusers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
