"""The one screen that stands when everything is up. Its snippets work when pasted."""

from __future__ import annotations

import json

from rich.text import Text

from pipeline.cli.deployment import Deployment

QUESTION = "What is the capital of France?"
KEY_VARIABLE = "POINTSMAN_API_KEY"


def welcome_text(deployment: Deployment) -> Text:
    """URLs, the model, where the password and the logs are, and two first calls."""
    options = deployment.options
    base = deployment.base_url
    rows = [
        ("API", f"{base}/v1  (as OpenAI's)"),
        *(("model", f"{plan.name}  (engine {options.engine})") for plan in deployment.plans),
        ("workers", _workers(deployment)),
        ("metrics", f"{base}/metrics"),
    ]
    if options.flower_port is not None:
        rows.append(
            ("Flower", f"{deployment.flower_url}  (login in {deployment.data_dir.flower_auth})")
        )
    if options.keys_file is not None:
        rows.append(("keys", f"{options.keys_file}  (put yours in ${KEY_VARIABLE})"))
    rows.append(("logs", f"{deployment.data_dir.logs}/<part>.log"))
    text = Text("\nPointsman is ready.\n\n", style="bold")
    for name, value in rows:
        text.append(f"  {name:<9}", style="bold cyan")
        text.append(f"{value}\n", style="not bold")
    text.append("\ncurl\n", style="bold cyan")
    text.append(curl_snippet(deployment), style="not bold")
    text.append("\nPython (pip install openai)\n", style="bold cyan")
    text.append(openai_snippet(deployment), style="not bold")
    text.append("\nCtrl-C drains and stops everything.\n", style="not bold dim")
    return text


def _workers(deployment: Deployment) -> str:
    text = ", ".join(f"{role} x{count}" for role, count in deployment.options.workers.items())
    return text if len(deployment.plans) == 1 else f"{text}  (of each model)"


def curl_snippet(deployment: Deployment) -> str:
    """A streamed chat, for a POSIX shell."""
    has_keys = deployment.options.keys_file is not None
    key_header = f'  -H "Authorization: Bearer ${KEY_VARIABLE}" \\\n' if has_keys else ""
    # Lines short enough for any terminal: what wraps does not paste.
    body = (
        f'{{"model": {json.dumps(deployment.model_name)}, "stream": true, "temperature": 0,\n'
        f'    "max_tokens": 64, "messages": [{{"role": "user",\n'
        f'    "content": {json.dumps(QUESTION)}}}]}}'
    )
    return (
        f"curl -N {deployment.base_url}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n{key_header}"
        f"  -d {_shell_quoted(body)}\n"
    )


def openai_snippet(deployment: Deployment) -> str:
    """The same with the openai package."""
    has_keys = deployment.options.keys_file is not None
    key = f'os.environ["{KEY_VARIABLE}"]' if has_keys else '"unused"'
    lines = [
        *(["import os"] if has_keys else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{deployment.base_url}/v1", api_key={key})',
        "answer = client.chat.completions.create(",
        f"    model={json.dumps(deployment.model_name)}, temperature=0, max_tokens=64,",
        f'    messages=[{{"role": "user", "content": "{QUESTION}"}}])',
        "print(answer.choices[0].message.content)",
    ]
    return "\n".join(lines) + "\n"


def _shell_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
