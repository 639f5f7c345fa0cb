"""Stock graphs: functions that return a Graph."""

STOCK = ("ppo", "a2c", "pg", "impala", "appo", "dqn", "apex", "sac")
"""The names of the stock graphs: each is the function of that name in the module of that name."""
