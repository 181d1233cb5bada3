"""A question that takes a tool."""

import verifiers.v1 as vf


class WeatherTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def weather(self, city: str) -> str:
        """The weather in a city."""
        return f"12 degrees in {city}"


class WeatherTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("12" in trace.last_reply)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class WeatherTaskset(vf.Taskset[WeatherTask, vf.TasksetConfig]):
    def load(self):
        yield WeatherTask(vf.TaskData(prompt="Oslo?"))

    @classmethod
    def toolsets(cls, config):
        return [WeatherTools(vf.SharedToolsetConfig())]


__all__ = ["WeatherTaskset"]

if __name__ == "__main__":
    WeatherTools.run()
