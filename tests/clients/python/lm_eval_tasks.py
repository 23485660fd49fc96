"""Runs two tasks of lm-eval.

A multiple-choice task uses log probabilities (local-completions, with the tokenizer of the server). A free-text task
uses both API models of lm-eval.
"""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from _env import BASE_URL, KEY, MODEL
from lm_eval.tasks import TaskManager

os.environ["OPENAI_API_KEY"] = KEY
rows = [{"question": f"What is 17 + {number}?", "choices": ["42", "7"], "answer": 0} for number in (25, 26, 27)]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 50}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "rows.jsonl")
    data.write_text("\n".join(map(json.dumps, rows)))
    Path(folder, "choice.yaml").write_text(CHOICE.replace("FILE", str(data)))
    Path(folder, "text.yaml").write_text(TEXT.replace("FILE", str(data)))
    tasks = TaskManager(include_path=folder, include_defaults=False)
    arguments = f"model={MODEL},base_url={BASE_URL}/completions,num_concurrent=2,max_retries=1,tokenized_requests=True"
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["local_choice", "local_text"],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    assert 0 <= result["results"]["local_choice"]["acc,none"] <= 1, result
    assert [len(result["samples"][name]) for name in ("local_choice", "local_text")] == [3, 3]
    arguments = f"model={MODEL},base_url={BASE_URL}/chat/completions,num_concurrent=2,max_retries=1"
    result = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=arguments,
        tasks=["local_text"],
        task_manager=tasks,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    # The model responds 42 to the first question, and repeats the text of the other questions.
    assert abs(result["results"]["local_text"]["exact_match,none"] - 1 / 3) < 1e-6, result["results"]
print("ok")
