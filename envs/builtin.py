"""Registers the environments that come with turngym; importing it loads none of them."""

from turngym.envs.registry import register

register("turngym/Calculator-v0", "turngym.envs.calculator:Calculator")
register("turngym/Lookup-v0", "turngym.envs.lookup:Lookup")
register("turngym/MathQA-v0", "turngym.envs.math_qa:MathQA")
register("turngym/PythonTool-v0", "turngym.envs.python_tool:PythonTool")
