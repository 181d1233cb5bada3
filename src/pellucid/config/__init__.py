"""Configuration: typed, frozen, one docstring per field. No torch, nothing else of pellucid.

One tree of keys serves every command. `pellucid rl` reads all of it; `pellucid trainer`,
`pellucid orchestrator` and `pellucid inference` read their own sections under the same names, so
that a key, a flag and an error message mean the same thing everywhere.
"""

from pellucid.config.commands import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    TrainerRunConfig,
    VerifyConfig,
)
from pellucid.config.data import DataConfig
from pellucid.config.inference import InferenceConfig
from pellucid.config.loss import (
    CispoLossConfig,
    CustomLossConfig,
    DppoLossConfig,
    GspoLossConfig,
    IcepopLossConfig,
    LossConfig,
    PpoClipLossConfig,
    Reduction,
    TisLossConfig,
)
from pellucid.config.model import ModelConfig
from pellucid.config.monitors import MonitorsConfig, PrometheusConfig, TensorboardConfig, WandbConfig
from pellucid.config.orchestrator import (
    AdvantageConfig,
    CustomAdvantageConfig,
    DefaultAdvantageConfig,
    EnvConfig,
    EnvironmentConfig,
    EvalConfig,
    FilterConfig,
    GroupAdvantageConfig,
    OrchestratorConfig,
    SamplingConfig,
    TeacherConfig,
)
from pellucid.config.trainer import (
    ExportColumns,
    ExportFormat,
    OptimConfig,
    SchedulerConfig,
    TokenExportConfig,
    TrainerConfig,
    TrainerPrecision,
)
from pellucid.config.transport import FilesystemTransportConfig, TransportConfig, ZmqTransportConfig

__all__ = [
    "AdvantageConfig",
    "CispoLossConfig",
    "CustomAdvantageConfig",
    "CustomLossConfig",
    "DataConfig",
    "DefaultAdvantageConfig",
    "DppoLossConfig",
    "EnvConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "ExportColumns",
    "ExportFormat",
    "FilesystemTransportConfig",
    "FilterConfig",
    "GroupAdvantageConfig",
    "GspoLossConfig",
    "IcepopLossConfig",
    "InferenceConfig",
    "InferenceRunConfig",
    "LossConfig",
    "ModelConfig",
    "MonitorsConfig",
    "OptimConfig",
    "OrchestratorConfig",
    "OrchestratorRunConfig",
    "PpoClipLossConfig",
    "PrometheusConfig",
    "RLConfig",
    "Reduction",
    "RunConfig",
    "SFTConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "TeacherConfig",
    "TensorboardConfig",
    "TisLossConfig",
    "TokenExportConfig",
    "TrainerConfig",
    "TrainerPrecision",
    "TrainerRunConfig",
    "TransportConfig",
    "VerifyConfig",
    "WandbConfig",
    "ZmqTransportConfig",
]
