"""Estimate of the memory of a job's state, by ZeRO stage."""

_FP32_RECORDS, _GRADIENT = 16, 4


def bytes_a_parameter(precision: str, workers: int, use_gpu: bool) -> list[float | None]:
    """Bytes per parameter in a worker's memory (a GPU's, or a CPU's with its copy of the state), by ZeRO stage 0 to 3.

    Activations, communication buffers and libraries are not included. An impossible stage gives None.
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
