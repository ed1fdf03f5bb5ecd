"""Workflows in ComfyUI's API format, as its menu exports them."""

from __future__ import annotations

from typing import Any


def text_to_image(**changes: Any) -> dict[str, Any]:
    """The one that every ComfyUI starts with. changes: fields of the sampler."""
    sampler = {
        "seed": 5, "steps": 3, "cfg": 7.5, "sampler_name": "euler", "scheduler": "normal", "denoise": 1,
        "model": ["4", 0], "positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0], **changes,
    }  # fmt: skip
    return {
        "3": {"class_type": "KSampler", "inputs": sampler, "_meta": {"title": "KSampler"}},
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 32, "height": 24, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a lighthouse", "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["4", 1]}},
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "out", "images": ["8", 0]}},
    }


def image_to_image() -> dict[str, Any]:
    workflow = text_to_image()
    workflow["10"] = {"class_type": "LoadImage", "inputs": {"image": "mine.png"}}
    workflow["9"]["inputs"]["images"] = ["8", 0]
    workflow["8"]["inputs"]["vae"] = ["10", 0]
    return workflow


def guided() -> dict[str, Any]:
    """As newer models are wired: separate noise, guider and scheduler, numbers in nodes of their own, a video out."""
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "big-fp8.safetensors", "weight_dtype": "default"}},
        "2": {
            "class_type": "DualCLIPLoader",
            "inputs": {"clip_name1": "t5.safetensors", "clip_name2": "l.safetensors", "type": "x"},
        },
        "3": {"class_type": "VAELoader", "inputs": {"vae_name": "ae.safetensors"}},
        "4": {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "rain on a window"}},
        "5": {"class_type": "CLIPTextEncode", "inputs": {"text": ["4", 0], "clip": ["2", 0]}},
        "6": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["5", 0]}},
        "7": {"class_type": "BasicGuider", "inputs": {"model": ["1", 0], "conditioning": ["6", 0]}},
        "8": {"class_type": "RandomNoise", "inputs": {"noise_seed": 11}},
        "9": {"class_type": "PrimitiveInt", "inputs": {"value": 640}, "_meta": {"title": "Side"}},
        "10": {
            "class_type": "EmptyVideoLatent",
            "inputs": {"width": ["9", 0], "height": ["9", 0], "length": 81, "batch_size": 1},
        },
        "11": {
            "class_type": "BasicScheduler",
            "inputs": {"scheduler": "simple", "steps": 20, "denoise": 1.0, "model": ["1", 0]},
        },
        "12": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "13": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {
                "noise": ["8", 0],
                "guider": ["7", 0],
                "sampler": ["12", 0],
                "sigmas": ["11", 0],
                "latent_image": ["10", 0],
            },
        },
        "14": {"class_type": "VAEDecode", "inputs": {"samples": ["13", 0], "vae": ["3", 0]}},
        "15": {"class_type": "CreateVideo", "inputs": {"images": ["14", 0], "fps": 24}},
        "16": {
            "class_type": "SaveVideo",
            "inputs": {"video": ["15", 0], "filename_prefix": "clip", "format": "mp4", "codec": "h264"},
        },
        "20": {"class_type": "CLIPTextEncode", "inputs": {"text": "nobody sees me", "clip": ["2", 0]}},
    }
