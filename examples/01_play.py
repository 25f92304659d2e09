"""Play one episode of a built-in environment: first by hand, then with its own expert."""

import random

import turngym

env = turngym.make("turngym/Calculator-v0", level=1, notation="words")

# Environments speak chat messages: reset returns the first ones and the tools on offer.
observation, info = env.reset(seed=0)
print("tools   ", [tool["function"]["name"] for tool in info["tools"]])
print("user    ", observation[0]["content"])

# An action is one assistant message. A wrong call is answered, not punished with an exception.
call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": {"expr": 7}}}
observation, reward, terminated, truncated, info = env.step(
    {"role": "assistant", "content": "", "tool_calls": [call]}
)
print("tool    ", observation[0]["content"])

# The expert knows the way; it also makes the demonstrations that training starts from.
observation, info = env.reset(seed=0)
terminated = truncated = False
while not (terminated or truncated):
    action = env.get_wrapper_attr("demonstrate")(random.Random(0), {})
    for called in action.get("tool_calls", []):
        print("call    ", called["function"])
    print("says    ", repr(action["content"]))
    observation, reward, terminated, truncated, info = env.step(action)
print("rewards ", info["rewards"], "->", reward)

# Text works too: the wrapper parses it like the output of a model.
text_env = turngym.TextActions(env, dialect="hermes")
text_env.reset(seed=0)
observation, *_ = text_env.step(
    '<tool_call>{"name": "calc", "arguments": {"expr": "6*7"}}</tool_call>'
)
print("tool    ", observation[0]["content"])
