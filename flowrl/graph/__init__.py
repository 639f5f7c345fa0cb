"""What an algorithm is: graph, rules, stage loop, abstract trace, plan and drawings."""
