"""Puts a run together from its configuration."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pellucid.config import TrainerRunConfig
from pellucid.config.trainer import TrainerModelConfig
from pellucid.data.spans import SpanLog
from pellucid.data.tokenizer import first_line, load_tokenizer
from pellucid.errors import ConfigError
from pellucid.export import TokenExporter
from pellucid.guard import weights_key
from pellucid.ledger import Journal, Stage
from pellucid.loss import loss_for
from pellucid.metrics import Sink, open_sinks
from pellucid.model import Adapters, Policy, packed_layout
from pellucid.model.kernels import check_compiler
from pellucid.model.load import check_tokenizer
from pellucid.model.stored import StoredWeights
from pellucid.trainer.batches import BatchSource
from pellucid.trainer.optimizer import Optimizer, TrainedWeights
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run
from pellucid.workers import keep_freed_memory, num_cores

if TYPE_CHECKING:
    from pellucid.transport.weights_offer import WeightsOffer
    from pellucid.transport.weights_store import StoredOffer
logger = logging.getLogger(__name__)


def load_trained(config: TrainerRunConfig, ranks: Ranks, *, num_runs: int = 1) -> list[TrainedWeights]:
    """Loads this process's shard of the model, and returns what each run trains of it.

    Of several processes, each reads its part of every weight from the model's files.
    That is the whole model or, with LoRA, one adapter per run; several runs need LoRA.
    """
    settings = config.trainer
    keep_freed_memory()
    torch.set_num_threads(max(1, (settings.threads or num_cores()) // ranks.num_local))
    torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment or a library says
    torch.manual_seed(config.seed)
    policy, stored = ranks.load(config.model, settings.model.seq_len, settings.model.layout)
    tokenizer = load_tokenizer(config.model.name)
    check_tokenizer(policy, tokenizer, config.model.name)
    adapters = prepare_policy(policy, config, ranks, stored, num_runs=num_runs)
    whole = TrainedWeights(policy, config.model, tokenizer, is_sharded=ranks.group is not None)
    if adapters is None:
        return [whole]
    if ranks.is_main:
        logger.info(adapters.summary)
    return [replace(whole, adapter=adapters[slot]) for slot in range(num_runs)]


def prepare_policy(
    policy: Policy,
    config: TrainerRunConfig,
    ranks: Ranks,
    stored: StoredWeights | None = None,
    *,
    num_runs: int = 1,
) -> Adapters | None:
    """Makes a loaded model compute as the configuration says, and shards it; returns its adapters, if any.

    `stored` is where its weights are to be read, if it has none yet.
    """
    settings, lora = config.trainer, config.model.lora
    check_way(policy, settings.model)
    if ranks.device.type == "cpu" and not settings.model.compile:
        policy.speed_up()
    adapters = None if lora is None else Adapters(policy, lora, num_slots=num_runs)
    ranks.hold(policy)  # after adapters were made, in the dtype that their weights had
    if settings.enable_router_replay:
        policy.replay_experts(weights=settings.replay_expert_weights)
    if settings.model.router_aux_loss_coef:
        if settings.model.compile and lora is not None and lora.dropout and policy.replay is None:
            raise ConfigError(
                "trainer.model.router_aux_loss_coef counts experts under model.lora.dropout = "
                f"{lora.dropout}, and a compiled forward may draw other numbers where it only counts; set "
                "model.lora.dropout to 0, or leave trainer.model.compile out"
            )
        policy.balance_experts()
    if settings.model.compile:
        ranks.alike(lambda: check_compiler(ranks.device))
        policy.compile_layers()  # before the next three, which wrap the compiled forward of a layer
    ranks.cast(policy)  # before the next: a layer that is computed again casts its weights again
    if settings.model.activation_checkpointing:
        policy.checkpoint_activations(is_random=lora is not None and lora.dropout > 0)
    ranks.shard(policy, stored)
    if policy.way == "rows" and ranks.computes_in == "bfloat16" and policy.replay is None:
        _check_half(policy)
    return adapters


def check_way(policy: Policy, settings: TrainerModelConfig) -> None:
    """Raises ConfigError if a setting needs packed sequences of text, and the model's are others."""
    if policy.images is not None and settings.compile:
        raise ConfigError(
            f"trainer.model.compile = true is not proven for models with images, such as "
            f"{type(policy.hf).__name__}; leave it out"
        )
    if policy.way == "packed":
        return
    for key, value, is_default in (
        ("cp", settings.cp, settings.cp == 1),
        ("compile", settings.compile, not settings.compile),
    ):
        if not is_default:
            raise ConfigError(
                f"trainer.model.{key} = {str(value).lower()} needs packed sequences, and those of "
                f"{type(policy.hf).__name__} go in rows: {policy.why_rows}; leave trainer.model.{key} out"
            )


def _check_half(policy: Policy) -> None:
    """Raises ConfigError if the family's own code mixes bfloat16 with float32; every process calls it."""
    ids = torch.zeros(2, dtype=torch.long, device=policy.device)
    try:
        with torch.no_grad():
            policy(ids, ids, torch.ones(2, device=policy.device), packed_layout([2]).to(policy.device))
    except RuntimeError as error:
        raise ConfigError(
            f"{type(policy.hf).__name__} does not compute in bfloat16 ({first_line(error)}); set "
            'trainer.model.precision = "float32"'
        ) from error


def build_run(
    config: TrainerRunConfig,
    batches: BatchSource,
    journal: Journal | None,
    sinks: Sequence[Sink],
    ranks: Ranks | None = None,
    *,
    publishes: bool = False,
    trained: TrainedWeights | None = None,
) -> Run:
    """Wires a run together. The main process logs to `sinks` and to those that the configuration asks for.

    `trained` is an adapter of a model that the run shares with others; by default it loads its own model. If
    one process fails to open a file, all processes raise, and each closes what it has opened.
    """
    settings, ranks = config.trainer, ranks or Ranks.alone(config.trainer)
    if trained is None:
        (trained,) = load_trained(config, ranks)
    if trained.adapter is not None:
        trained.adapter.reset(config.seed)
    losses = ranks.alike(lambda: loss_for(settings.loss))
    with ExitStack() as opened:
        exporter: TokenExporter | None = None
        if (export := settings.experimental.token_export) is not None:
            options = dict(export)
            exporting = ranks.alike(
                lambda: TokenExporter(
                    config.output_dir, rank=ranks.rank, precision=ranks.computes_in, **options
                )
            )
            opened.callback(exporting.close)
            # Raises ConfigError in every process if another run owns the folder.
            ranks.share(lambda: exporting.claim(resume=config.resume))
            exporter = exporting if ranks.keeps_books else None
        opened_sinks = ranks.alike(lambda: open_sinks(config, "trainer") if ranks.is_main else [])
        for sink in opened_sinks:
            opened.callback(sink.close)
        offer = None
        if publishes and config.weights.transport != "filesystem":
            offer = ranks.alike(lambda: open_offer(config, ranks.device) if ranks.is_main else None)
        if offer is not None:
            opened.callback(offer.close)
        run = Run(
            config=settings,
            output_dir=config.output_dir,
            max_steps=config.max_steps,
            trained=trained,
            losses=losses,
            optimizer=Optimizer(
                trained.module, settings.optim, settings.scheduler, max_steps=config.max_steps
            ),
            batches=batches,
            sinks=[*opened_sinks, *sinks] if ranks.is_main else [],
            journal=journal,
            exporter=exporter,
            publishes=publishes,
            publishes_deltas=config.weights.deltas,
            spans=SpanLog(config.output_dir, "trainer") if ranks.is_main else None,
            ranks=ranks,
            offer=offer,
        )
        opened.pop_all()
    return run


def open_offer(config: TrainerRunConfig, device: torch.device) -> "WeightsOffer | StoredOffer":
    """Takes the port at which servers read the weights, or opens the store. `device`: the trainer's."""
    if config.weights.transport == "object-store":
        from pellucid.transport.weights_store import StoredOffer, WeightsStore

        return StoredOffer(config.output_dir, WeightsStore(config.weights.url))
    from pellucid.transport.weights_offer import WeightsOffer

    key = weights_key(config.weights.run_key(config.output_dir))
    sender = None
    if config.weights.transfer != "files":
        from pellucid.transport.weights_transfer import WeightsSender

        sender = WeightsSender(config.weights.transfer, device)
    return WeightsOffer(config.output_dir, config.weights.host, config.weights.port, key, sender)


def open_journal(config: TrainerRunConfig, ranks: Ranks) -> Journal | None:
    """Opens `trainer.jsonl`, `trainer_1.jsonl`, …: one per rank. Raises in all processes if one cannot."""
    name = f"trainer_{ranks.rank}.jsonl" if ranks.rank else "trainer.jsonl"
    path = config.output_dir / "ledger" / name
    return ranks.alike(
        lambda: Journal(path, Stage.TRAINER, resume=config.resume) if ranks.keeps_books else None
    )
