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
from pellucid.config.shared import (
    FilesystemTransportConfig,
    InferenceConfig,
    ModelConfig,
    MonitorsConfig,
    PrometheusConfig,
    TensorboardConfig,
    TransportConfig,
    WandbConfig,
    ZmqTransportConfig,
)
from pellucid.config.trainer import (
    CispoLossConfig,
    CustomLossConfig,
    DataConfig,
    DppoLossConfig,
    ExportColumns,
    ExportFormat,
    GspoLossConfig,
    IcepopLossConfig,
    LossConfig,
    OptimConfig,
    PpoClipLossConfig,
    Reduction,
    SchedulerConfig,
    TisLossConfig,
    TokenExportConfig,
    TrainerConfig,
    TrainerPrecision,
)
