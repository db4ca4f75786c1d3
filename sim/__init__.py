"""servecast: forecasts of LLM serving."""
