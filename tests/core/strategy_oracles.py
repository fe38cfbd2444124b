"""What each strategy, correction and kind of condition must do, as checks that raise AssertionError on a wrong answer.

Each drives the real code: a routing against a plain loop over its definition, or samples against closed forms.
Shapes: B rows, K experts.
"""

import itertools

import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core import calibration, condition, routing
from ddm_ray.core.routing import parse_strategy
from ddm_ray.sampling import batches, driver, noise
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from tests.core import closed_forms, oracles


def probabilities(seed: int, rows: int, num_experts: int, spread: float = 2.0) -> Tensor:
    """Random posteriors from flat to nearly sure, float64 (B, K)."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, num_experts, generator=generator, dtype=torch.float64)).softmax(dim=1)


def route(name: str, probs_BK: Tensor, before_BK: Tensor | None = None, step: int = 0) -> Tensor:
    """The weights by the strategy of this name, with the real stream of uniforms where it draws."""
    strategy = parse_strategy(name, probs_BK.shape[1])
    uniforms_BK = noise.routing_uniforms(range(len(probs_BK)), probs_BK.shape[1], step)
    before_BK = torch.zeros_like(probs_BK) if before_BK is None else before_BK
    return strategy.route(probs_BK, before_BK, uniforms_BK if strategy.draws else None)


def renormalised(probs: list[float], kept: list[int]) -> Tensor:
    """The dense weights (K,) of the experts kept."""
    total = sum(probs[k] for k in kept)
    return torch.tensor([probs[k] / total if k in kept else 0.0 for k in range(len(probs))], dtype=torch.float64)


def check_kept(name: str, kept_of, num_experts: int = 6) -> None:
    """A strategy that keeps a subset keeps the one that its definition says, in proportion."""
    probs_BK = torch.cat([probabilities(seed, 40, num_experts, spread=0.3 + seed) for seed in range(3)])
    actual_BK = route(name, probs_BK)
    for probs_K, actual_K in zip(probs_BK, actual_BK, strict=True):
        right_K = renormalised(probs_K.tolist(), kept_of(probs_K.tolist()))
        assert torch.allclose(actual_K, right_K, atol=1e-12, rtol=0), (name, probs_K, actual_K, right_K)


def check_top() -> None:
    for kept in (1, 2, 5):
        check_kept(f"top-{kept}", lambda probs, n=kept: sorted(range(len(probs)), key=lambda k: -probs[k])[:n])


def check_threshold() -> None:
    for least in (0.05, 0.2, 0.6, 0.95):
        check_kept(
            f"threshold-{least}",
            lambda probs, least=least: [k for k, p in enumerate(probs) if p >= least or p == max(probs)],
        )


def check_nucleus() -> None:
    for mass in (0.3, 0.7, 0.95, 1.0):
        check_kept(f"nucleus-{mass}", lambda probs, mass=mass: nucleus(probs, mass))


def nucleus(probs: list[float], mass: float) -> list[int]:
    """Likeliest first until the mass is reached, the one that crosses it included."""
    kept: list[int] = []
    for k in sorted(range(len(probs)), key=lambda k: -probs[k]):
        if sum(probs[j] for j in kept) < mass - 1e-13:
            kept.append(k)
    return kept


def check_nucleus_temperature() -> None:
    """Weights and choice are those of p^(1/T): sharper below 1."""
    probs_BK = probabilities(0, 60, 5, spread=1.0)
    for temperature in (0.25, 0.5, 3.0):
        powered_BK = probs_BK ** (1 / temperature)
        powered_BK = powered_BK / powered_BK.sum(dim=1, keepdim=True)
        actual_BK = route(f"nucleus-0.8-{temperature}", probs_BK)
        for powered_K, actual_K in zip(powered_BK, actual_BK, strict=True):
            right_K = renormalised(powered_K.tolist(), nucleus(powered_K.tolist(), 0.8))
            assert torch.allclose(actual_K, right_K, atol=1e-12, rtol=0)


def check_sticky(margin: float = 0.15) -> None:
    """A row's expert changes exactly when another is likelier by more than the margin, and then to the likeliest."""
    rows, held, before, stayed = 30, [], None, 0
    for step in range(25):
        probs_BK = probabilities(100 + step, rows, 4, spread=0.5)
        before = route(f"sticky-{margin}", probs_BK, before)
        assert before.sort(dim=1).values.tolist() == [[0.0, 0.0, 0.0, 1.0]] * rows
        likeliest = probs_BK.argmax(dim=1).tolist()
        if held:
            gains = [float(probs_BK[row, likeliest[row]] - probs_BK[row, held[row]]) for row in range(rows)]
            stayed += sum(0 < gain <= margin for gain in gains)
            held = [best if gain > margin else now for best, now, gain in zip(likeliest, held, gains, strict=True)]
        else:
            held = likeliest
        assert before.argmax(dim=1).tolist() == held
    assert stayed > 100


def check_sample_k(num_rows: int = 4000) -> None:
    """Distinct experts; every set as often as draws without replacement give it; weights in proportion."""
    probs = [0.80, 0.15, 0.05]
    probs_BK = torch.tensor([probs], dtype=torch.float64).expand(num_rows, 3)
    for drawn in (1, 2, 3):
        actual_BK = route(f"sample-{drawn}", probs_BK, step=drawn)
        assert ((actual_BK > 0).sum(dim=1) == drawn).all()
        frequency: dict[tuple[int, ...], float] = {}
        for order in itertools.permutations(range(3), drawn):
            chance, left = 1.0, 1.0
            for k in order:
                chance, left = chance * probs[k] / left, left - probs[k]
            key = tuple(sorted(order))
            frequency[key] = frequency.get(key, 0.0) + chance
        for kept, chance in frequency.items():
            same_B = ((actual_BK > 0) == (renormalised(probs, list(kept)) > 0)).all(dim=1)
            assert abs(float(same_B.double().mean()) - chance) < 0.03
            assert torch.allclose(actual_BK[same_B], renormalised(probs, list(kept)).expand(int(same_B.sum()), 3))


def check_draws_differ() -> None:
    """Seeds and steps draw independently: neither row nor step repeats another's."""
    probs_BK = torch.full((400, 4), 0.25, dtype=torch.float64)
    first_B, second_B = (route("sample-1", probs_BK, step=step).argmax(dim=1) for step in (0, 1))
    for drawn_B in (first_B, second_B):
        assert (drawn_B.bincount(minlength=4) / 400 - 0.25).abs().max() < 0.08
    assert abs(float((first_B == second_B).double().mean()) - 0.25) < 0.08


def check_oracle() -> None:
    """Each image is the wanted cluster's expert's alone: at its closed-form end."""
    system, cluster_B = closed_forms.three_gaussians(), torch.tensor([2, 0, 1, 1, 0, 2])
    settings = SamplingSettings(steps=100, strategy="oracle")
    request = SampleRequest(tuple(range(6)), torch.ones(6, dtype=torch.int64), settings, cluster_B)
    noise_BD = oracles.initial_noise(request.seeds, (1, 1, 2)).double().flatten(1)
    right_BD = system.mean_CKD[1, cluster_B] + system.std_CK[1, cluster_B, None] * noise_BD
    together = driver.sample(request, system.info(), system.experts)
    assert (together.images_BCHW.flatten(1) - right_BD).abs().max() < 5e-3
    assert torch.equal(together.experts_SB, cluster_B.expand(100, 6))
    # Its parts, in another order, are the same images.
    order = torch.tensor([4, 5, 0, 2, 1, 3])
    parts = [driver.sample(request.rows(rows), system.info(), system.experts) for rows in (order[:3], order[3:])]
    again = batches.joined(parts, order.argsort())
    assert (again.images_BCHW - together.images_BCHW).abs().max() < 1e-12
    assert torch.equal(again.routing_SBK, together.routing_SBK)


def check_reweighed() -> None:
    """Within a step the experts stay, in the proportions of the later posterior; a tempered one where there is a T."""
    first_BK, later_BK = probabilities(0, 60, 5, spread=1.0), probabilities(1, 60, 5, spread=1.0)
    for name, power in (
        ("top-2", 1),
        ("threshold-0.2", 1),
        ("nucleus-0.8", 1),
        ("nucleus-0.8-0.5", 2),
        ("sample-3", 1),
    ):
        held = route(name, first_BK)
        actual_BK = parse_strategy(name, 5).reweigh(held, later_BK)
        for held_K, later_K, actual_K in zip(held, later_BK, actual_BK, strict=True):
            right_K = renormalised((later_K**power).tolist(), held_K.nonzero()[:, 0].tolist())
            assert torch.allclose(actual_K, right_K, atol=1e-12, rtol=0), name


def check_full_by_another_name(num_images: int = 6, steps: int = 12) -> None:
    """Strategies that keep all experts are `full` at every velocity: the same images, by any solver."""
    system, num_experts = closed_forms.three_gaussians(), 3
    for solver in ("heun", "midpoint", "ab2"):
        fields = {"solver": solver, "steps": steps}
        right = oracles.sample_system(system, num_images, 0, strategy="full", **fields).images_BCHW
        for name in (f"top-{num_experts}", f"sample-{num_experts}"):
            actual = oracles.sample_system(system, num_images, 0, strategy=name, **fields).images_BCHW
            assert (actual - right).abs().max() < 1e-12, (solver, name)
    for name in ("nucleus-1", "threshold-0.000000001"):  # ab2 begins anew where an expert comes or goes
        actual = oracles.sample_system(system, num_images, 0, strategy=name, solver="heun", steps=steps).images_BCHW
        right = oracles.sample_system(system, num_images, 0, strategy="full", solver="heun", steps=steps).images_BCHW
        assert (actual - right).abs().max() < 1e-6, name


def check_sample_1_tends_to_full(num_images: int = 200) -> None:
    """Drawing at each step has the mean velocity of `full`: trajectories come closer as steps go up."""
    system, label_B = closed_forms.three_gaussians(), torch.ones(num_images, dtype=torch.int64)
    right = oracles.sample_system(system, num_images, 1, strategy="full", solver="heun", steps=40).images_BCHW
    off = []
    for steps in (8, 128):
        settings = SamplingSettings(steps=steps, strategy="sample-1", solver="euler")
        request = SampleRequest(tuple(range(num_images)), label_B, settings)
        actual = driver.sample(request, system.info(), system.experts, system.router).images_BCHW
        off.append(float((actual - right).flatten(1).norm(dim=1).median()))
    assert off[1] < 0.5 * off[0]


def check_router_temperature(system: closed_forms.GaussianMixture | None = None, temperature: float = 1.7) -> None:
    """A router that is overconfident by 1 / T, corrected by T, mixes to the data's field."""
    system = system or closed_forms.three_gaussians()
    x_BCHW, label_B = oracles.gaussian_points(system, 20, seed=8)
    settings = SamplingSettings(strategy="full", router_temperature=temperature)

    def router(*inputs: Tensor) -> Tensor:
        return temperature * system.router(*inputs)

    for t in (0.2, 0.85):
        right = system.velocity(x_BCHW.flatten(1), t, label_B)
        actual = driver.mixture_velocity(x_BCHW, t, label_B, system.info(), system.experts, router, settings=settings)
        assert (actual.flatten(1) - right).abs().max() < 1e-10 * (1 + right.abs().max()) / (1 - t)


def check_fit_temperature(temperature: float = 2.3, num_rows: int = 20_000) -> None:
    """Labels drawn from softmax(logits / T) give T back, and a lower cross-entropy than T = 1."""
    generator = torch.Generator().manual_seed(0)
    logits_NK = 3 * torch.randn(num_rows, 5, generator=generator, dtype=torch.float64)
    expert_N = torch.multinomial((logits_NK / temperature).softmax(dim=1), 1, generator=generator)[:, 0]
    fitted = calibration.fit_temperature(logits_NK, expert_N)
    assert abs(fitted / temperature - 1) < 0.05
    at_fit = calibration.cross_entropy(logits_NK, expert_N, fitted)
    assert at_fit < calibration.cross_entropy(logits_NK, expert_N)
    assert all(at_fit <= calibration.cross_entropy(logits_NK, expert_N, fitted * by) for by in (0.97, 1.03))


def check_texts(strategy: str = "once", condition: int = 0, num_images: int = 2000) -> None:
    """Images of a text are those of its condition, the router being asked at pure noise that isn't the image's."""
    texts = closed_forms.Texts(closed_forms.three_gaussians())
    request = SampleRequest(
        tuple(range(num_images)),
        texts.texts(torch.full((num_images,), condition)),
        SamplingSettings(steps=16, strategy=strategy, solver="heun"),
    )
    router = texts.early_router if strategy == "once" else texts.router
    images = driver.sample(request, texts.info(), texts.experts, router).images_BCHW
    oracles.check_images(texts.system, images, condition)


def check_text_guidance() -> None:
    """A guided text's field is that of its condition: the rows of branches and of experts stay with their texts."""
    texts = closed_forms.Texts(closed_forms.guided_gaussians())
    oracles.check_gaussian_guidance(texts=texts)
    x_BCHW, _ = oracles.gaussian_points(texts.system, 12, seed=2)
    label_B, cluster_B = torch.arange(12) % 2, torch.arange(12) // 2 % 3
    routed = {"settings": SamplingSettings(strategy="oracle"), "cluster_B": cluster_B}
    actual = driver.mixture_velocity(x_BCHW, 0.6, texts.texts(label_B), texts.info(), texts.experts, **routed)
    t_B = torch.full((12,), 0.6, dtype=torch.float64)
    each = torch.stack([expert(x_BCHW, t_B, label_B) for expert in texts.system.experts])
    assert (actual - each[cluster_B, torch.arange(12)]).abs().max() < 1e-12


def check_conditions_are_apart() -> None:
    """What a joined condition holds, and in which order: texts and labels alike."""
    texts = closed_forms.Texts(closed_forms.three_gaussians())
    one, two = texts.texts(torch.tensor([0, 1, 1])), texts.texts(torch.tensor([1, 0]))
    both = condition.join([one, two])
    assert torch.equal(both.tokens_BLE, torch.cat([one.tokens_BLE, two.tokens_BLE]))
    assert torch.equal(both.mask_BL, torch.cat([one.mask_BL, two.mask_BL]))
    assert condition.join([torch.tensor([3, 1]), torch.tensor([2])]).tolist() == [3, 1, 2]


def check_steps_are_reported(steps: int = 5) -> None:
    """on_step hears every step once: its number, the time it ended at, and x there, which at last is the image."""
    one, seen, heard = closed_forms.ONE, [], []

    def watching(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        seen.append((float(t_B[0]), x_BCHW))
        return one.experts[0](x_BCHW, t_B, label_B)

    for solver, per_step in (("heun", 2), ("ab2", 1)):
        seen.clear()
        heard.clear()
        settings = SamplingSettings(steps=steps, solver=solver, times="shifted-2")
        request = SampleRequest((1, 2), torch.tensor([0, 0]), settings)
        record = lambda *step: heard.append(step)  # noqa: E731
        sampled = driver.sample(request, one.info(), [watching], on_step=record)
        starts = seen[per_step::per_step]
        assert [number for number, _, _ in heard] == list(range(steps))
        assert [t for _, t, _ in heard] == [t for t, _ in starts] + [0.0]
        ends = [x_BCHW for _, x_BCHW in starts] + [sampled.images_BCHW]
        assert all(torch.equal(x_BCHW, end) for (_, _, x_BCHW), end in zip(heard, ends, strict=True))


def check_history_restarts_with_guidance(solver: str) -> None:
    """Where guidance sets in the field jumps as at a switch of expert: history restarts, the integral is exact."""
    info = MixtureInfo(1, (1, 1, 1), 1, torch.ones(2, 1, dtype=torch.float64), dtype=torch.float64)
    experts = [lambda x, t, label: (1.0 - label.double()).view(-1, 1, 1, 1).expand_as(x)]
    settings = SamplingSettings(steps=8, guidance_scale=3.0, solver=solver, guidance_interval=(0.0, 0.5))
    request = SampleRequest((1, 2), torch.tensor([0, 0]), settings)
    images = driver.sample(request, info, experts).images_BCHW
    right = oracles.initial_noise((1, 2), (1, 1, 1)).double() - 0.5 * 1 - 0.5 * 3
    assert (images - right).abs().max() < 1e-12


def check_draw() -> None:
    """The inverse CDF: each interval of uniforms to its expert, as wide as its probability."""
    prior_BK = torch.tensor([[0.5, 0.0, 0.3, 0.2]], dtype=torch.float64).expand(1000, 4)
    drawn = routing.draw_expert(prior_BK, (torch.arange(1000) + 0.5).double() / 1000)
    assert drawn.argmax(dim=1).tolist() == [0] * 500 + [2] * 300 + [3] * 200
    assert (drawn.amax(dim=1) == 1).all()
    assert (drawn.sum(dim=1) == 1).all()
