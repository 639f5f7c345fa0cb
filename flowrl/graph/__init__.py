"""WHAT an algorithm is: the graph, its rules, the one stage loop, the abstract trace, the plan, the drawings."""
