"""Makes a Qwen2.5-VL of about 180,000 parameters with random weights, and pictures for its dataset.

usage: tests/trl/make_vlm.py TOKENIZER_FOLDER MODEL_FOLDER PICTURE_FOLDER

TOKENIZER_FOLDER is assets/tiny. Needs the environment of `rlood runtime install trl --extras vlm`.
"""

import pathlib
import sys

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# A content is a text, or a list of parts of which some are images.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(tokenizer_folder, folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    pixels = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
    images, videos = Qwen2VLImageProcessor(**pixels), Qwen2VLVideoProcessor(**pixels)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)
    parameters = list(model.parameters())
    print(f"{sum(parameter.numel() for parameter in parameters)} parameters")


def make_pictures(folder):
    folder.mkdir(exist_ok=True)
    sizes = [(56, 56), (84, 56), (56, 112), (70, 90)]
    for number, (size, name) in enumerate(zip(sizes, ["a.png", "b.jpg", "c.webp", "d.gif"])):
        Image.new("RGB", size, (40 * number, 255 - 40 * number, 90)).save(folder / name)


if __name__ == "__main__":
    source, model, pictures = sys.argv[1:]
    make_model(source, pathlib.Path(model))
    make_pictures(pathlib.Path(pictures))
