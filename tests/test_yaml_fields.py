"""Values of configurations are what their fields' types say: YAML's guesses lose nothing of what was written."""

from pathlib import Path
from typing import Any

import pytest

from ddm_ray.config import load_recipe, read_yaml
from ddm_ray.errors import ConfigError
from ddm_ray.placement import load_islands

TEXTS = [
    "photos #1",
    "2024",
    "010",
    "no",
    "null island",
    "2024-01-01",
    "1e3",
    "~/my photos",
    "a: b",
    "[x]",
    "- x",
    "x,y",
]


def source_of(*settings: str) -> str:
    return load_recipe("tiny", settings).data.source


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_taken_as_it_is_written(text: str) -> None:
    assert source_of(f"data.source={text}") == text
    assert source_of(f"data.source={text!r}") == text, "quotes aren't needed, and aren't part of it"


@pytest.mark.parametrize("text", ["2024", "010", "no", "2024-01-01", "1e3", "0x10", "1:30", "true"])
def test_so_it_is_in_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    shipped = load_recipe("tiny").model_dump_json()
    file.write_text(shipped.replace('"digits"', text, 1).replace('"source":', '"source": ', 1))
    assert load_recipe(str(file)).data.source == text
    file.write_text(f"islands: {{{text}: {{address: {text}, resources_per_worker: {{CPU: 010}}}}}}")
    ((name, island),) = load_islands(str(file)).items()
    assert (name, island.address, island.train.asked) == (text, text, {"CPU": 10})


@pytest.mark.parametrize(("text", "steps"), [("010", 10), ("+12", 12), ("1_000", 1000), ("10.0", 10)])
def test_numbers_are_decimal(text: str, steps: int) -> None:
    config = load_recipe("tiny", (f"expert.train.steps={text}", "expert.train.warmup_steps=0", "data.heldout=1e-1"))
    assert config.expert.train.steps == steps and config.data.heldout == 0.1


@pytest.mark.parametrize("text", ["0x10", "1:30", "0o10", "1e99x", "ten"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expert\.train\.steps"):
        load_recipe("tiny", (f"expert.train.steps={text}",))


@pytest.mark.parametrize(
    "setting", ["expert.train.steps=500 # of 800", "data.class_names=[a, b] #c", "data.text=null #x"]
)
def test_nothing_is_cut_off(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"'#.*' isn't read, as it is a comment; leave it out$"):
        load_recipe("tiny", (setting,))


def test_lists_mappings_and_nothing() -> None:
    config = load_recipe("tiny", ("data.class_names=[no, 010, 1e3, null, x y]", "data.text=null", "data.format=null"))
    assert config.data.class_names == ("no", "010", "1e3", "null", "x y")
    assert config.data.text is None and config.data.format is None
    assert load_recipe("tiny", ("data.horizontal_flips=yes",)).data.horizontal_flips is True
    vit = load_recipe("tiny", ("embedder={kind: timm, model: 010, model_args: {depth: 010, name: no, on: true}}",))
    assert vit.embedder.model == "010"
    assert vit.embedder.model_args == {"depth": 10, "name": "no", "on": True}


PLAIN: dict[str, Any] = {
    "[1, -2, +3, 007, 1_000]": [1, -2, 3, 7, 1000],
    "[1.5, .5, 1e3, 1.5e-3, -.inf]": [1.5, 0.5, 1000.0, 0.0015, float("-inf")],
    "[true, False, null, ~, '']": [True, False, None, None, ""],
    "[yes, off, 0x1, 0o7, 1:30, 2024-01-01]": ["yes", "off", "0x1", "0o7", "1:30", "2024-01-01"],
    "{1: '1', no: \"no\"}": {"1": "1", "no": "no"},
}


@pytest.mark.parametrize("text", PLAIN)
def test_without_types_numbers_truth_and_nothing_are_known(text: str) -> None:
    assert read_yaml(text, "here") == PLAIN[text]


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text('data: {source: a}\npartition:\n  num_clusters: 2\n"data": {source: b}\n')
    with pytest.raises(ConfigError, match=r"my.yaml: not YAML: line 4, column 1: data comes twice$"):
        load_recipe(str(file))
    merged = "{p: {q: &a {<<: &b {x: 1}, x: 2}}, r: {<<: *a, x: 3}, s: {<<: *b}}"
    assert read_yaml(merged, "here") == {"p": {"q": {"x": 2}}, "r": {"x": 3}, "s": {"x": 1}}


@pytest.mark.parametrize("field", ["data.split", "data.num_classes", "data.text"])
def test_none_is_not_null(field: str) -> None:
    with pytest.raises(ConfigError, match=r"none is a text like others; write null for no value$"):
        load_recipe("tiny", (f"{field}=none",))


@pytest.mark.parametrize("text", ["{", "a: [", "!!python/object:x {}", "\x00", "[" * 10_000, "a: {{path}}", "{[a]: 1}"])
def test_what_is_no_yaml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: not YAML: "):
        read_yaml(text, "here")
