"""Tables and figures drawn from run artifacts."""
