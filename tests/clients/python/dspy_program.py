"""Checks dspy: signatures with the JSON adapter, one of them with typed fields."""

import dspy
from _env import BASE_URL, KEY, MODEL

lm = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False, num_retries=0)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
assert dspy.Predict("question -> answer")(question="What is the capital of France?").answer == "Paris"
typed = dspy.Predict("text -> name: str, age: int")(text="Jason is 25 years old.")
assert (typed.name, typed.age) == ("Jason", 25), typed
print("ok")
