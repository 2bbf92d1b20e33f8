"""What a target gives beside mlx-lm's logits, and that mlx-lm's maths are untouched."""

import shutil
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_spec.errors import Incompatible
from mlx_spec.rollback import Transaction
from mlx_spec.targets import target_for
from models import DEMO, RANDOM, TRAINED, assert_same_caches, checkpoint_path, dump, pair


@pytest.mark.parametrize("name", RANDOM)
def test_parity_with_torch(name, tmp_path):
    """In float32 from the file on: mlx-lm folds the one into the norms in the file's dtype."""
    shutil.copy(checkpoint_path(name) / "config.json", tmp_path)
    weights = mx.load(str(checkpoint_path(name) / "model.safetensors"))
    weights = {k: v.astype(mx.float32) for k, v in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    model, _ = load_model(tmp_path)
    reference = dump(f"{name}_target")
    tokens = mx.array(reference["input_ids"][0])
    hidden, logits = Transaction(target_for(model), make_prompt_cache(model)).verify(tokens)
    np.testing.assert_allclose(hidden, reference["last_hidden"], atol=5e-4)
    np.testing.assert_allclose(logits, reference["logits"], atol=5e-4)


@pytest.mark.parametrize("name", [*RANDOM, *TRAINED, DEMO])
def test_a_forward_in_a_transaction_is_the_plain_forward(name):
    p = pair(name)
    tokens = mx.array(p.prompt[:7])
    plain, caches = make_prompt_cache(p.model), make_prompt_cache(p.model)
    expected = p.model(tokens[None], cache=plain)
    transaction = Transaction(p.target, caches)
    hidden, logits = transaction.verify(tokens)
    transaction.commit(7)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(p.target.lm_head(hidden), expected)
    assert_same_caches(caches, plain)


@pytest.mark.parametrize("module", [qwen3_5, qwen3_next])
def test_the_hooked_name_is_what_mlx_lm_calls(module):
    """Fails when upstream moves the recurrence: then nothing would be recorded."""
    layer = module.GatedDeltaNet if module is qwen3_5 else module.Qwen3NextGatedDeltaNet
    assert "gated_delta_update" in layer.__call__.__code__.co_names
    assert module.gated_delta_update.__module__ == "mlx_lm.models.gated_delta"


def test_recording_ends_with_the_forward_and_stays_in_its_thread():
    p = pair("qwen3-5")
    original = qwen3_5.gated_delta_update
    with p.target.recording() as replays:
        assert qwen3_5.gated_delta_update is not original
        other = threading.Thread(
            target=lambda: p.model(mx.array([[1, 2]]), cache=make_prompt_cache(p.model))
        )
        other.start()
        other.join()
        assert replays == []
        p.model(mx.array([[1, 2]]), cache=make_prompt_cache(p.model))
        assert len(replays) == 3
    assert qwen3_5.gated_delta_update is original


def test_recordings_of_two_threads_leave_nothing_behind():
    """The second one waits for the first, and takes what that one has put back."""
    original = qwen3_5.gated_delta_update
    target = pair("qwen3-5").target
    entered = threading.Event()

    def record():
        entered.set()
        with target.recording():
            pass

    with target.recording():
        second = threading.Thread(target=record)
        second.start()
        entered.wait()
        second.join(0.05)
        assert second.is_alive()
    second.join()
    assert qwen3_5.gated_delta_update is original


def test_recording_ends_after_an_error():
    original = qwen3_5.gated_delta_update
    with pytest.raises(RuntimeError), pair("qwen3-5").target.recording():
        raise RuntimeError
    assert qwen3_5.gated_delta_update is original


@pytest.mark.parametrize("spread", ["sharded", "pipelined"])
def test_a_model_spread_over_machines_is_refused(spread):
    model, _ = load_model(checkpoint_path("qwen3-5"), lazy=True)
    if spread == "sharded":
        model.layers[0].linear_attn.sharding_group = object()
    else:
        model.model.pipeline_size = 2
    with pytest.raises(Incompatible, match="several machines"):
        target_for(model)
