"""Stock graphs: functions that return a Graph."""
