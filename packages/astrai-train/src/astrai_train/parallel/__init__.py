"""How the ranks of a run share the work: who they are, how the model is spread over them, how they are started."""
