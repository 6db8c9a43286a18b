"""Real transfers of live ranks, with assistants that stand in for absent group members."""
