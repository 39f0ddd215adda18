# SPDX-License-Identifier: Apache-2.0
"""Write the tiny pair's byte-level tokenizer: id b is byte b, special tokens follow.

The special tokens carry Kimi's names. Needs `tokenizers`; loads as an ordinary fast tokenizer without remote code.

    python make_tokenizer.py checkpoint/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Ids 256 onwards, in this order. train.py and materialize.py name some of these ids.
SPECIAL = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
    "[PAD]",
)

# Kimi's turn layout; image and video parts become the placeholder that the engine expands.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{ part.text }}
{%- else -%}
<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each byte, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def main(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_characters())}, merges=[]))
    # use_regex=False: no pre-splitting, so that the ids are the bytes and nothing else.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    for i, token in enumerate(SPECIAL):
        assert tokenizer.token_to_id(token) == 256 + i
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "additional_special_tokens": list(SPECIAL[2:-1]),
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
