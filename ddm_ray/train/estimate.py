"""Memory of a training's state before it runs, by ZeRO stage."""

_FP32_RECORDS, _GRADIENT = 16, 4


def bytes_a_parameter(precision: str, workers: int, use_gpu: bool) -> list[float | None]:
    """Bytes a parameter of a worker's memory (a GPU's, or a CPU's with its copy of the state), by ZeRO stage 0 to 3.

    Activations, buffers of communication and libraries come on top. None for a stage that can't be.
    """
    copy = {"bf16": 2, "fp32": 4}[precision]
    # Within the step a flat gradient, and a second one if that isn't in fp32. A CPU also holds the copy of its state.
    within = _GRADIENT + (2 if copy == 2 else 0)
    sharded = _FP32_RECORDS + within + (0 if use_gpu else _FP32_RECORDS)
    return [
        None if copy == 2 else 4 + sharded - (0 if use_gpu else _FP32_RECORDS * (1 - 1 / workers)),
        2 * copy + sharded / workers,
        copy + (copy + sharded) / workers,
        (2 * copy + sharded) / workers,
    ]
