"""Where a run's first weights come from."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ops.models import ModelConfig, prepare_model
from schemas import UserError

MAKER = """
import json
def make(path, seed):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"seed": seed}))
    (path / "model.safetensors").write_text("weights")
    (path / "model.safetensors").chmod(0o600)
    with (path.parent / "calls").open("a") as calls:
        calls.write("x")
def fails(path, seed):
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text("half")
    raise RuntimeError("disk full")
def nothing(path, seed):
    pass
"""


def made(folder: Path, function: str = "make", seed: int = 0, source: str = MAKER) -> Path:
    (folder / "maker.py").write_text(source)
    return Path(prepare_model(ModelConfig(make=f"maker.py:{function}"), folder, folder / "cache", seed))


def test_a_made_model_is_made_once_for_each_seed_and_text(tmp_path: Path) -> None:
    """Making may download or take minutes; but an edited recipe must not give yesterday's model."""
    first = made(tmp_path)
    assert json.loads((first / "config.json").read_text()) == {"seed": 0}
    assert made(tmp_path) == first
    assert (tmp_path / "cache" / "calls").read_text() == "x"
    assert made(tmp_path, seed=1) != first
    assert made(tmp_path, source=MAKER + "# edited") != first


def test_other_users_may_read_a_made_model(tmp_path: Path) -> None:
    """transformers writes weights with mode 0600; workers may run as another user."""
    assert (made(tmp_path) / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_maker_that_fails_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    """Half a model in the cache would be taken for a whole one the next time."""
    with pytest.raises(RuntimeError, match="disk full"):
        made(tmp_path, "fails")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_maker_that_makes_nothing_is_told_what_to_do(tmp_path: Path) -> None:
    """The usual mistake: save_pretrained forgotten, or to another path."""
    with pytest.raises(UserError, match=r"'maker\.py:nothing' made no model.*Call save_pretrained\(path\)"):
        made(tmp_path, "nothing")


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """Relative to the recipe, absolute in the result: workers run elsewhere."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    config = ModelConfig(path="models/mine")
    assert prepare_model(config, tmp_path, tmp_path, 0) == str((tmp_path / "models" / "mine").resolve())


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("./mine", r"There is no model folder .*mine\. Correct model\.path"),
        ("/no/such/model", r"There is no model folder /no/such/model\."),
        ("empty", r"The model folder .*empty has no config\.json"),
        ("someone/no-such-model", r"'someone/no-such-model' is neither a folder .* nor to be had from the hub"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, says: str
) -> None:
    """Instead of a traceback through the hub's client, or a retry without end where there is no network."""
    (tmp_path / "empty").mkdir()
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=says) as caught:
        prepare_model(ModelConfig(path=path), tmp_path, tmp_path, 0)
    assert caught.value.remedy


@pytest.mark.parametrize("fields", [{}, {"path": "a", "make": "b.py:c"}])
def test_exactly_one_source_is_given(fields: dict[str, str]) -> None:
    """Two sources would leave it to chance which one is trained."""
    with pytest.raises(ValidationError, match=r"either model\.path or model\.make"):
        ModelConfig(**fields)
