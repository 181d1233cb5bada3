"""Two agents: a player who is asked twice, and a judge who does not train."""

import verifiers.v1 as vf


class DebateTask(vf.Task[vf.TaskData]):
    pass


class DebateTaskset(vf.Taskset[DebateTask, vf.TasksetConfig]):
    def load(self):
        yield DebateTask(vf.TaskData(prompt="why?"))


class DebateConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    both_train: bool = False


class DebateEnv(vf.Env[DebateConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = self.config.both_train

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            await player.turn()
            answer = await player.turn("sure?")
        await agents.judge.run(DebateTask(vf.TaskData(prompt=f"judge: {answer.last_reply}")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        player, judge = episode.traces
        player.record_reward("won", float(judge.last_reply == "yes"))
        player.info["branches"] = [branch.token_ids for branch in player.branches]


__all__ = ["DebateEnv", "DebateTaskset"]
