"""The configuration of a run that is derived from another: clusters' numbers, beginnings, and what is refused."""

import pytest

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.config.changes import Appended
from ddm_ray.config.derive import ChangeRequest, derived_config, router_stays
from ddm_ray.errors import ConfigError

pytestmark = pytest.mark.unit

NEW = Appended(source="x", files=1, listing="0" * 64)
EIGHT = ("partition.num_clusters=8", "partition.num_fine=16")


REFUSED: dict[str, tuple[dict, str]] = {
    "there is none": ({"drop": (8,)}, "drop 8: the base has clusters 0 to 7"),
    "both": ({"drop": (3,), "split": (3,)}, "cluster 3: leaves, splits or is retrained: choose one"),
    "retrained": ({"retrain": (3,), "split": (3,)}, "cluster 3: leaves, splits or is retrained"),
    "of none": ({"begin_from": 2}, "begin from 2: is for new clusters, and none is added"),
    "made anew": (
        {"drop": (3,), "settings": ("partition.seed=1",)},
        "clusters that change one by one can't be made again, too: derive two runs",
    ),
    "all": ({"drop": tuple(range(8))}, "drop: no cluster would remain"),
    "source": ({"settings": ("data.source=shapes",)}, "data.source: a source isn't replaced in a derived run"),
    "its strategy": (
        {"drop": (0, 1, 2, 3, 4, 5, 6), "settings": ("sample.strategy=top-2",)},
        "sample.strategy: unknown strategy 'top-2' for 1 experts",
    ),
}


@pytest.fixture(scope="module")
def eight() -> RunConfig:
    return load_recipe("tiny", EIGHT)


def test_clusters_keep_their_numbers_and_new_ones_have_new_ones(eight: RunConfig) -> None:
    left = derived_config(eight, "a", ChangeRequest(drop=(7, 3)))
    assert left.partition.clusters == (0, 1, 2, 4, 5, 6) and left.partition.num_clusters == 6
    joined = derived_config(left, "b", ChangeRequest(add=(("x", 1), ("y", 2)), split=(4,)))
    assert joined.partition.clusters == (0, 1, 2, 5, 6, 8, 9, 10, 11, 12)
    assert [each.clusters for each in joined.changes.joined] == [(8,), (9, 10)]
    assert joined.changes.split == {4: (11, 12)} and not joined.changes.pooled
    again = derived_config(joined, "c", ChangeRequest(drop=(12,)))
    assert derived_config(again, "d", ChangeRequest(add=(("z", 1),))).partition.clusters[-1] == 13
    all_clusters = derived_config(eight, "a", ChangeRequest(add=(("x", 1),)))
    assert all_clusters.partition.numbers == () and all_clusters.partition.clusters == tuple(range(9))


def test_children_begin_as_their_parent_and_others_as_is_wanted(eight: RunConfig) -> None:
    config = load_recipe("tiny", (*EIGHT, "experts={3: {model: {width: 16}}}"))
    split = derived_config(config, "a", ChangeRequest(split=(3,), add=(("x", 1),)))
    for child in split.changes.split[3]:
        assert split.expert_of(child).train.init_from.network == "expert 3"
        assert split.expert_of(child).model.width == 16
    assert 3 not in split.experts and split.expert_of(8) == config.expert
    assert split.router.train.init_from.network == "own"
    assert derived_config(config, "a", ChangeRequest(split=(3,)), has_router=False).router.train.init_from is None
    near = derived_config(config, "a", ChangeRequest(add=(("x", 1),), begin_from=3)).expert_of(8)
    assert near.train.init_from.network == "expert 3" and near.model.width == 16


def test_settings_of_new_experts_are_theirs_alone(eight: RunConfig) -> None:
    request = ChangeRequest(settings=("experts.new.train.steps=9",), split=(3,), add=(("x", 1),))
    config = derived_config(eight, "a", request)
    assert [config.expert_of(cluster).train.steps for cluster in (0, 8, 9, 10)] == [300, 9, 9, 9]
    assert config.expert_of(9).train.init_from.network == "expert 3"
    with pytest.raises(ConfigError, match=r"experts.new is for new clusters, and there is none"):
        derived_config(eight, "a", ChangeRequest(settings=("experts.new.train.steps=9",), drop=(3,)))


@pytest.mark.parametrize("named", REFUSED)
def test_what_does_not_go_together_is_refused(eight: RunConfig, named: str) -> None:
    request, message = REFUSED[named]
    with pytest.raises(ConfigError) as caught:
        derived_config(eight, "a", ChangeRequest(**request))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["label", "random"])
def test_only_clusters_of_k_means_are_split(method: str) -> None:
    config = load_recipe("tiny", (f"partition.method={method}",))
    for request in (ChangeRequest(split=(0,)), ChangeRequest(add=(("x", 2),))):
        with pytest.raises(ConfigError, match=f"partition.method is {method}: only clusters of k-means"):
            derived_config(config, "a", request)
    assert derived_config(config, "a", ChangeRequest(add=(("x", 1),), drop=(0,))).partition.clusters == (1, 2)


def test_a_router_of_other_settings_is_trained(eight: RunConfig) -> None:
    left = derived_config(eight, "a", ChangeRequest(drop=(3,)))
    assert router_stays(eight, left)
    for setting in ("router.train.seed=1", "router.train.steps=999", "router.train.init_from=null"):
        other = derived_config(eight, "a", ChangeRequest(settings=(setting,), drop=(3,)))
        assert not router_stays(eight, other), setting


def test_retraining_takes_another_seed(eight: RunConfig) -> None:
    again = derived_config(eight, "a", ChangeRequest(retrain=(3,)))
    assert again.expert_of(3).train.seed == eight.expert.train.seed + 1 and again.expert_of(2) == eight.expert


def test_adapters_join_and_are_retrained_from_their_base() -> None:
    init = "expert.train.init_from={source: runs/base, network: monolith}"
    config = load_recipe("tiny", (*EIGHT, init, "expert.adapter.rank=2"))
    derived = derived_config(config, "a", ChangeRequest(add=(("x", 1),), retrain=(2,)))
    assert (
        derived.expert_of(8) == config.expert and derived.expert_of(2).train.init_from == config.expert.train.init_from
    )
    assert derived.expert_of(2).train.seed == 1
    for changes in ({"split": (1,)}, {"add": (("x", 1),), "begin_from": 2}, {"append": NEW}):
        with pytest.raises(ConfigError, match="the experts are adapters, and all begin with their base alone"):
            derived_config(config, "a", ChangeRequest(**changes))
