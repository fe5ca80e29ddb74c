"""Modules become their parallel variants, and nothing does where one of them cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.alphafold.convert import convert_modules, silent_parts


class _Plain(nn.Linear):
    pass


class _Variant(_Plain):
    factor: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


class _Other(_Plain):
    """A subclass that is in no table."""


VARIANTS: dict[type[nn.Module], type[nn.Module]] = {_Plain: _Variant}


def _model() -> nn.Sequential:
    return nn.Sequential(_Plain(2, 2), nn.Sequential(_Plain(2, 2), nn.Linear(2, 2)), _Other(2, 2))


def test_every_module_of_a_class_is_converted_and_no_other() -> None:
    model = _model()
    parameters, plain = dict(model.named_parameters()), model[0]
    x = torch.randn(3, 2)
    before = plain(x)
    assert convert_modules(model, VARIANTS, factor=3.0) is model
    with pytest.raises(AttributeError):
        plain(x)
    assert {name: type(module) for name, module in model.named_modules()} == {
        "": nn.Sequential,
        "0": _Variant,
        "1": nn.Sequential,
        "1.0": _Variant,
        "1.1": nn.Linear,
        "2": _Other,
    }
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model[0](x), 3.0 * before)


def test_what_sends_messages_is_not_compiled_as_one() -> None:
    model = _model()
    convert_modules(model, VARIANTS, factor=1.0, shards=None)
    for part in (model[0], model[1][0]):
        with pytest.raises(ConfigError, match=r"compile the modules that .*silent_parts\(\) returns"):
            part.compile(backend="eager")
    for part in silent_parts(model):
        part.compile(backend="eager")


def test_the_model_itself_may_be_converted() -> None:
    weight, hooked = (plain := _Plain(2, 2)).weight, []
    plain.register_forward_hook(lambda module, *_: hooked.append(module))
    model = convert_modules(plain, VARIANTS, factor=1.0)
    assert type(model) is _Variant
    assert model.weight is weight
    model(torch.zeros(2))
    assert hooked == [model]


def test_a_module_that_is_registered_twice_stays_one() -> None:
    shared = _Plain(2, 2)
    model = convert_modules(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}), VARIANTS, factor=1.0)
    assert type(model["a"]) is _Variant
    assert model["a"] is model["b"][0]  # type: ignore[index]


@pytest.mark.parametrize("name", ["", "1.0"])
def test_a_second_time_is_refused(name: str) -> None:
    model: nn.Module = _Plain(2, 2) if not name else _model()
    if name:
        model.set_submodule(name, _Variant(2, 2))
    else:
        model = convert_modules(model, VARIANTS, factor=1.0)
    with pytest.raises(ConfigError, match=f"dap: {name or 'the model'} is parallel already; apply it once"):
        convert_modules(model, VARIANTS, factor=1.0)
    assert not name or type(model[0]) is _Plain  # type: ignore[index]


def test_a_wrapped_forward_is_refused_before_anything_changes() -> None:
    model = _model()
    model[1][0].forward = model[1][0].forward
    with pytest.raises(ConfigError, match=r"the forward of 1\.0 was wrapped before"):
        convert_modules(model, VARIANTS, factor=1.0)
    assert type(model[0]) is _Plain


def test_a_model_without_anything_to_convert_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has neither an MSA nor a pair to shard"):
        convert_modules(nn.Linear(2, 2), VARIANTS)


def test_what_sends_no_messages_can_be_compiled() -> None:
    model = _model()
    assert silent_parts(model) == [model]
    convert_modules(model[1], VARIANTS, factor=1.0, shards=None)
    assert silent_parts(model) == [model[0], model[2]]
    assert silent_parts(model[1]) == [model[1][1]]
