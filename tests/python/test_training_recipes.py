"""The named recipes say what their papers say."""

from __future__ import annotations

import pytest

from tidegate.models import presets
from tidegate.training import TrainConfig, recipes
from tidegate.training.recipe import recipe_named


def test_recipe_of_table_16():
    recipe = recipes()["hgrn-wikitext103"]
    config = TrainConfig(**recipe.train)
    model = presets()[recipe.preset]
    assert (config.steps, config.batch_size, config.context) == (50_000, 128, 512)
    assert (config.lr, config.schedule, config.warmup_steps) == (5e-4, "inverse-sqrt", 4_000)
    assert (config.betas, config.eps, config.weight_decay) == ((0.9, 0.98), 1e-8, 0.2)
    assert config.clip == 0.0
    assert config.tokenizer == f"bpe:{model.vocab_size}"


@pytest.mark.parametrize(
    ("name", "lr", "tokens"), [("fox-757m", 1.25e-3, 15 * 2**30), ("fox-360m", 1.5e-3, 7 * 2**30)]
)
def test_recipes_of_the_forgetting_transformer(name, lr, tokens):
    """FoT, appendix B.1: warm-up over 256 Mi tokens, cosine to a tenth, batches of half a Mi."""
    recipe = recipes()[name]
    config = TrainConfig(**recipe.train)
    model = presets()[recipe.preset]
    batch = config.batch_size * config.context
    assert batch == 2**19
    assert config.steps * batch == tokens
    assert config.warmup_steps * batch == 256 * 2**20
    schedule = config.learning_rate()
    assert config.lr == lr
    assert schedule(config.steps - 1, 1.0) == pytest.approx(0.1)
    assert (config.betas, config.weight_decay, config.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (model.init_std, model.tied, model.mixer) == (0.02, False, "fox")


def test_an_earlier_name_is_still_known():
    assert recipe_named("fox-760m") == recipes()["fox-757m"]
    assert "fox-760m" not in recipes()


def test_recipes_are_the_callers_own():
    recipes()["demo"].train["lr"] = 1.0
    assert recipes()["demo"].train["lr"] == 3e-3
