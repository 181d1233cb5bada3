"""Loading a policy by hub name or folder, with errors that say what to do."""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from pellucid.config import ModelConfig
from pellucid.config.trainer import SequenceLayout
from pellucid.data.images import FAMILIES, ImageShape
from pellucid.data.rules import Experts
from pellucid.data.tokenizer import check_vocabulary, first_line, quiet_transformers, require_folder
from pellucid.errors import ModelError
from pellucid.model.attention import ATTENTION, attention_function
from pellucid.model.kernels import check_kernel
from pellucid.model.policy import Policy
from pellucid.model.proof import prove
from pellucid.model.rope import fix_frequencies
from pellucid.model.routing import router_shape, routers_of
from pellucid.model.stored import NotByRows, StoredWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = logging.getLogger(__name__)


def load_policy(
    config: ModelConfig,
    *,
    trainable: bool = False,
    max_length: int | None = None,
    device: torch.device | None = None,
    layout: SequenceLayout = "auto",
) -> Policy:
    """Loads the model in evaluation mode: dropout would make trainer and inference disagree.

    `device` is the GPU if there is one, unless it is given.
    A trainable model is float32 whatever `model.dtype` says: small updates vanish in bfloat16 weights.
    It computes packed sequences if those of up to `max_length` tokens are proved right, or else sequences in
    rows; see `model/proof.py`. Raises a `ModelError` if neither is right.
    """
    from transformers import AutoConfig

    quiet_transformers()
    require_folder(config.name)
    device = device or default_device()
    dtype = torch.float32 if trainable else resolve_dtype(config, device)
    try:
        described = AutoConfig.from_pretrained(config.name, trust_remote_code=False)
        (hf, info), own_code = _attending(
            described,
            lambda attention: _auto_class(described).from_pretrained(
                config.name,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,  # left out, transformers asks on the terminal
            ),
        )
    except Exception as error:  # of all kinds: OSError, ValueError, SafetensorError, of strict dataclasses
        raise ModelError(_not_loadable(config.name, error)) from error
    _check_complete(config.name, info)
    return _proved(hf, device, max_length, layout, own_code, trainable=trainable)


_Made = TypeVar("_Made")


def _auto_class(described: Any) -> Any:
    """Returns the class of transformers that makes the model: one with images, or of text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if ImageShape.of(described) is None else AutoModelForImageTextToText


_Attention = str | dict[str, str]


def _attending(described: Any, make: Callable[[_Attention], _Made]) -> tuple[_Made, str]:
    """Makes a model that attends by plans, or by its own code; returns also why it cannot be packed then.

    A vision tower attends by itself, to the patches of one tile.
    """
    from transformers import AttentionInterface

    # Without a mask function of the same name, HF builds no mask of its own: the plan masks attention.
    AttentionInterface.register(ATTENTION, attention_function)
    has_images = ImageShape.of(described) is not None

    def attention(name: str) -> _Attention:
        return {"text_config": name, "vision_config": "sdpa"} if has_images else name

    try:
        return make(attention(ATTENTION)), ""
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        return make(attention("eager")), "it has attention code of its own"


def _proved(
    hf: Any,
    device: torch.device,
    max_length: int | None,
    layout: SequenceLayout,
    own_code: str,
    *,
    trainable: bool,
) -> Policy:
    context = _context(hf.config)
    if max_length is not None and context is not None and max_length > context:
        key = "trainer.model.seq_len" if trainable else "inference.max_model_len"
        raise ModelError(
            f"{key} = {max_length} exceeds the context of the model, {context} tokens "
            f"(max_position_embeddings in its config.json); set {key} to at most {context}"
        )
    policy = Policy(hf).to(device).eval()
    if said := fix_frequencies(hf, max_length):
        logger.info("%s: %s", type(hf).__name__, said)
    prove(policy, max_length, layout, own_code=own_code)
    check_kernel(device)
    return policy


def unread_policy(config: ModelConfig, max_length: int | None = None) -> tuple[Policy, StoredWeights]:
    """Makes a trainable policy on torch's meta device, and looks up its weights in the model's files.

    Raises NotByRows if a process cannot read its part of them alone, and ModelError, as `load_policy` does,
    if weights are missing or misshapen.
    """
    quiet_transformers()
    try:
        policy = empty_policy(config, max_length)
    except Exception as error:  # of all kinds; loading the model says what is wrong with it
        raise NotByRows(first_line(error)) from error
    stored = StoredWeights(config.name, policy.hf)
    _check_complete(config.name, stored.misfits)
    return policy, stored


def prove_unread(
    policy: Policy, config: ModelConfig, max_length: int | None, layout: SequenceLayout = "auto"
) -> None:
    """Proves a policy that has no weights by one like it with random ones; gives it buffers and traits of it.

    The proof asks which layers call the plan, what masks hide, and whether positions, buffers or parts beside
    attention tell sequences apart. The answers follow from the architecture, config.json and `max_length`. Of
    the weights it only needs that they hide nothing, as zeros would. So all layers are there, and those of a
    kind share their weights: they take the memory of one.

    Raises the ModelErrors of `load_policy` that are about the architecture, and NotByRows if transformers
    cannot make such a model.
    """
    from transformers import GenerationConfig

    generator = torch.Generator().manual_seed(0)
    shared: dict[tuple[str, torch.Size], torch.Tensor] = {}
    weights = {}
    names = {tensor: name for name, tensor in policy.hf.state_dict(keep_vars=True).items()}  # tied ones once
    for tensor, name in names.items():
        kind = re.sub(r"\.\d+\.", ".", name), tensor.shape
        if kind not in shared:
            shared[kind] = _random(name, tensor, generator)
        weights[name] = shared[kind]
    try:
        (hf, info), own_code = _attending(
            policy.hf.config,
            lambda attention: type(policy.hf).from_pretrained(
                None,
                config=policy.hf.config,
                state_dict=weights,
                dtype=torch.float32,
                attn_implementation=attention,
                output_loading_info=True,
            ),
        )
    except Exception as error:
        raise NotByRows(first_line(error)) from error
    if info["missing_keys"] or info["mismatched_keys"]:
        raise NotByRows(f"transformers maps {min(info['missing_keys'] or weights)} to another name")
    proved = _proved(hf, torch.device("cpu"), max_length, layout, own_code, trainable=True)
    policy.traits = proved.traits
    for name, buffer in proved.hf.named_buffers():
        path, _, attribute = name.rpartition(".")
        policy.hf.get_submodule(path)._buffers[attribute] = buffer
    with suppress(OSError):  # few models have none
        policy.hf.generation_config = GenerationConfig.from_pretrained(config.name)


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws a weight of a size at which every layer matters: about one of a norm, about zero of a bias."""
    drawn = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if not tensor.is_floating_point():
        return drawn
    if tensor.dim() > 1:
        return drawn.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    return drawn.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.1, generator=generator)


def vocab_size(config: ModelConfig) -> int:
    """Reads the size of the vocabulary without loading the weights."""
    return int(read_config(config).get_text_config().vocab_size)


def experts_of(config: ModelConfig) -> Experts:
    """Reads the shape of the routers without loading the weights, for trainer.enable_router_replay."""
    return router_shape(routers_of(empty_model(config), "trainer.enable_router_replay")).experts


def context_length(config: ModelConfig) -> int | None:
    """Reads the longest sequence that the model is made for, in tokens, without loading the weights; None:
    its config.json does not say."""
    return _context(read_config(config))


def read_config(config: ModelConfig) -> Any:
    """Reads config.json, as transformers' config of the model's family."""
    from transformers import AutoConfig

    require_folder(config.name)
    try:
        return AutoConfig.from_pretrained(config.name, trust_remote_code=False)
    except Exception as error:  # of all kinds, as in load_policy
        raise ModelError(_not_loadable(config.name, error)) from error


def empty_model(config: ModelConfig, device: str | torch.device = "meta") -> torch.nn.Module:
    """Makes the model, by default with names and shapes alone; loads no weights."""
    described = read_config(config)
    with torch.device(device):
        model, _ = _attending(
            described,
            lambda attention: _auto_class(described).from_config(
                described,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=False,
            ),
        )
    made: torch.nn.Module = model
    return made


def empty_policy(config: ModelConfig, max_length: int | None = None) -> Policy:
    """Makes a trainable policy on torch's meta device, for weights that another process has loaded."""
    policy = Policy(empty_model(config)).eval()
    fix_frequencies(policy.hf, max_length)
    return policy


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


def check_tokenizer(policy: Policy, tokenizer: Any, name: str) -> None:
    check_vocabulary(name, num_tokens=len(tokenizer), vocab_size=policy.vocab_size)


def _check_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raises ModelError if weights are missing or misshapen: transformers silently draws them at random."""
    misfits = [
        *(f"{key} is missing" for key in info["missing_keys"]),
        *(
            f"{key} has shape {list(found)} instead of {list(wanted)}"
            for key, found, wanted in info["mismatched_keys"]
        ),
    ]
    if misfits:
        shown = ", ".join(sorted(misfits)[:3]) + (" and others" if len(misfits) > 3 else "")
        raise ModelError(
            f"model.name = {name!r}: its weights do not fit its config.json: {shown}; "
            "use the files of one and the same model"
        )


def _context(config: Any) -> int | None:
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context


def _not_loadable(name: str, error: Exception) -> str:
    reason = first_line(error)
    if "AutoModelForCausalLM" in str(error) and "Unrecognized configuration class" in str(error):
        return (
            f"model.name = {name!r}: transformers has no causal language model of this family; of those with "
            f"images, {' and '.join(FAMILIES)} (model_type in config.json) are trained: see docs/models.md"
        )
    remedy = (
        "check that it holds config.json and safetensors"
        if Path(name).exists()
        else "give a local model folder or a hub name that this machine can reach"
    )
    return f"model.name = {name!r}: the model could not be loaded ({reason}); {remedy}"
