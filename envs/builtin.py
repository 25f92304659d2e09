"""Registers the environments that come with turngym; importing it loads none of them."""

from turngym.envs.registry import register

register("turngym/Calculator-v0", "turngym.envs.calculator:Calculator")
