"""What is trained and tested for multi-query associative recall, by name.

`zoology` and `based` follow the configurations of HazyResearch/zoology for figure 2 of Zoology
(4261f62; 512 tokens are commented out there) and figure 2 of Based (339cca8): examples, rows of a
batch and their fixed order, epochs, learning rates, AdamW without warm-up or clipping, and an end
where the mean accuracy over the test settings is above 0.99 after an epoch. What differs here:

- Blocks are those of our language model: an MLP after every mixer (there is none), no dropout of
  embeddings (0.1), and no convolution layer before attention.
- One head for all mixers; theirs have two in delta_net, gated_delta_net and ttt (see --heads).
- The cosine falls with every step, not with every epoch. Weight decay is on linear maps only.
- What ends a training and chooses the rate are validation examples of the test settings, not the
  test examples themselves. Examples come from other random numbers.
"""

from __future__ import annotations

from typing import Any

from .mqar import Setting
from .mqar_preset import Group, Preset, Source


def _settings(*pairs: tuple[int, int]) -> tuple[Setting, ...]:
    return tuple(Setting(*pair) for pair in pairs)


def _alone(length: int, pairs: int, examples: int) -> Group:
    setting = Setting(length, pairs)
    return Group((Source(setting, examples),), (setting,))


#: Of both published trainings.
_PUBLISHED: dict[str, Any] = {
    "vocab_size": 8192,
    "shuffle": False,
    "every_rate": True,
    "validate_on": "test",
    "check_every": None,
    "warmup": 0.0,
    "clip": None,
    "betas": (0.9, 0.999),
}

PRESETS = {
    preset.name: preset
    for preset in (
        # A model for each setting.
        Preset(
            "zoology",
            groups=(
                _alone(64, 4, 100_000),
                _alone(128, 8, 100_000),
                _alone(256, 16, 100_000),
                _alone(512, 64, 100_000),
            ),
            widths=(64, 128, 256, 512),
            learning_rates=(1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2),
            epochs=64,
            batch_rows=((64, 512), (128, 512), (256, 256), (512, 128)),
            test_examples=3000,
            random_non_queries=False,
            **_PUBLISHED,
        ),
        # One model for all settings, some longer than any in training.
        Preset(
            "based",
            groups=(
                Group(
                    (
                        Source(Setting(64, 4), 100_000),
                        Source(Setting(128, 8), 20_000),
                        Source(Setting(256, 16), 20_000),
                        Source(Setting(256, 32), 20_000),
                        Source(Setting(256, 64), 20_000),
                    ),
                    _settings((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128),
                              (1024, 256)),
                ),
            ),
            widths=(64, 128, 256),
            learning_rates=(1e-3, 10**-2.5, 1e-2, 10**-1.5),
            epochs=32,
            batch_rows=((64, 256), (128, 256), (256, 256)),
            **_PUBLISHED,
        ),
        # For a CPU: minutes for a model. No training example comes twice.
        Preset(
            "small",
            vocab_size=192,
            groups=(
                Group(
                    (
                        Source(Setting(64, 4), 20_000),
                        Source(Setting(64, 8), 20_000),
                        Source(Setting(128, 16), 8_000),
                        Source(Setting(256, 32), 8_000),
                    ),
                    _settings((64, 4), (64, 8), (128, 16), (256, 32), (256, 64)),
                ),
            ),
            widths=(32, 64),
            learning_rates=(1e-2,),
            steps=1500,
            batch_tokens=2048,
            easy_first=0.4,
            test_examples=500,
            validation_examples=32,
            check_every=100,
            random_non_queries=False,
        ),
    )
}  # fmt: skip


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
