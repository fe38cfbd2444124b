"""Names that pipelines of diffusers have and ours lack, each with what to use in its place."""

from collections.abc import Mapping
from typing import Any

from ddm_ray.errors import SamplingError

_ENCODED = "give prompt as a Text of ddm_ray.core.condition"
_PROMPT = "every text encoder is given prompt and negative_prompt: leave it out"
_TIMES = "use num_inference_steps, with the times and the solver of the settings"
_IMAGE = "begin at latents, or change them in callback_on_step_end"
_ATTENTION = "attention is torch's, which takes little memory already: leave it out"
_DECODER = "an autoencoder decodes 8 latents at once: leave it out, or call with a smaller batch_size"
_ADAPTER = "nothing is added to finished networks: train the run with it"
_FILES = "files are safetensors in one folder on this machine: leave it out"

ARGUMENTS = {
    **dict.fromkeys(["height", "width"], "images have the models' own size: leave it out, and resize the pictures"),
    **dict.fromkeys(["prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"], _ENCODED),
    **dict.fromkeys(["negative_prompt_embeds", "negative_pooled_prompt_embeds"], "give negative_prompt as a string"),
    **dict.fromkeys(["prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3"], _PROMPT),
    **dict.fromkeys(["timesteps", "sigmas"], _TIMES),
    "eta": "no noise is drawn on the way: leave it out",
    "guidance_rescale": "use guidance_interval, which leaves out the noisy steps",
    "clip_skip": "texts are encoded as in training: leave it out",
    "max_sequence_length": "texts have the length that the run was trained with: leave it out",
    **dict.fromkeys(["cross_attention_kwargs", "joint_attention_kwargs"], _ADAPTER),
    **dict.fromkeys(["ip_adapter_image", "ip_adapter_image_embeds"], _ADAPTER),
    **dict.fromkeys(["image", "mask_image", "strength"], _IMAGE),
    **dict.fromkeys(["callback", "callback_steps"], "use callback_on_step_end"),
}
"""Arguments of a call."""

LOADING = {
    **dict.fromkeys(["variant", "use_safetensors", "revision", "token", "cache_dir", "local_files_only"], _FILES),
    **dict.fromkeys(["force_download", "subfolder", "low_cpu_mem_usage"], _FILES),
    **dict.fromkeys(["device_map", "max_memory"], "use device, and offload for what doesn't fit there"),
    "quantization_config": "use dtype, torch.bfloat16 or torch.float16",
    **dict.fromkeys(["custom_pipeline", "trust_remote_code"], "no code of a folder is run: leave it out"),
    **dict.fromkeys(["safety_checker", "feature_extractor"], "there is none: leave it out"),
    "scheduler": "give a call its solver, times and num_inference_steps",
    **dict.fromkeys(["text_encoder", "vae"], "give it to DDMPipeline itself, as text_encoder or latents"),
}
"""Arguments of `from_pretrained`."""

ATTRIBUTES = {
    "enable_sequential_cpu_offload": "use enable_model_cpu_offload, or open it with offload='disk', which takes least",
    "enable_group_offload": "use enable_model_cpu_offload, or open it with offload='disk'",
    **dict.fromkeys(["enable_attention_slicing", "disable_attention_slicing"], _ATTENTION),
    **dict.fromkeys(["enable_xformers_memory_efficient_attention"], _ATTENTION),
    **dict.fromkeys(["enable_vae_slicing", "enable_vae_tiling"], _DECODER),
    "enable_freeu": "these networks are no U-Nets: leave it out",
    **dict.fromkeys(["load_lora_weights", "fuse_lora", "load_textual_inversion", "load_ip_adapter"], _ADAPTER),
    "scheduler": "give a call its solver, times and num_inference_steps",
    **dict.fromkeys(["unet", "transformer"], "the networks are models.experts and models.router"),
    "vae": "it is components.latents.autoencoder",
    "text_encoder": "it is components.text_encoder.model",
    "tokenizer": "it is components.text_encoder.tokenizer",
    "safety_checker": "there is none",
    "from_single_file": "open a folder by from_pretrained",
    "save_config": "use save_pretrained",
    "reset_device_map": "nothing is spread over devices: leave it out",
}
"""Methods and attributes of a pipeline."""


def refuse_arguments(given: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """SamplingError for the first argument that has a remedy, whatever its value; others are left to the caller."""
    for name in given:
        if name in known:
            raise SamplingError(f"{name}: {known[name]}")
