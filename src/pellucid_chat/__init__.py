"""`pellucid-chat`: a harness inside the process. No program is started: an episode costs milliseconds.

verifiers finds a harness by the name of a top-level package; this is it.

It talks to the model and its tools until a reply calls none. As verifiers has it, model calls go to the
interception server and tools are MCP servers, so limits, `@stop` hooks and tool gates work as in any harness.
"""

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

HARNESS_ID = "pellucid-chat"

_TOO_LONG = 413


class ChatHarnessConfig(vf.HarnessConfig):
    pass


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        messages = self._opening(data)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            tools = RolloutTools(schemas, dispatch, connections, http, tool_interception_url)
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": tools.schemas or None}
                async with http.post(f"{endpoint.rstrip('/')}/chat/completions", json=body) as answer:
                    if answer.status == _TOO_LONG and len(messages) > len(self._opening(data)):
                        return _result(0)  # out of room is a limit, not a failure
                    if answer.status != 200:
                        return _result(1, await answer.text())
                    reply = (await answer.json())["choices"][0]["message"]
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return _result(0)
                messages += [await tools.use(call) for call in reply["tool_calls"]]

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system_prompt, prompt = self.resolve_prompt(data)
        opening = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or ())]


@dataclass(frozen=True, slots=True)
class RolloutTools:
    """The tools of one rollout; the model gets an error in a call as the tool's answer."""

    schemas: list[dict[str, Any]]
    dispatch: dict[str, tuple[str, str]]
    servers: dict[str, Any]
    http: aiohttp.ClientSession
    gate: str | None
    """Address that is asked before each call; None: every call is made."""

    async def use(self, call: dict[str, Any]) -> dict[str, Any]:
        """Returns the tool message that answers a call."""
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            arguments, problem = {}, f"invalid JSON ({error})"
        else:
            problem = "" if isinstance(arguments, dict) else "not a JSON object"
        if self.gate is not None:
            question = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            async with self.http.post(self.gate, json=question) as answer:
                answer.raise_for_status()
                verdict = await answer.json()
            if verdict["action"] == "stop":
                raise RuntimeError(f"the rollout was stopped: {verdict['reason']}")
            if verdict["action"] == "deny":
                return dict(verdict["message"])
        if problem:
            content: Any = f"error: the arguments are {problem}; send the call again"
        elif name not in self.dispatch:
            content = f"error: there is no tool {name!r}"
        else:
            content = await call_mcp(self.servers, self.dispatch, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _result(exit_code: int, stderr: str = "") -> vf.ProgramResult:
    return vf.ProgramResult(exit_code=exit_code, stdout="", stderr=stderr)
