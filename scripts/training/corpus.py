"""Text to train on: the standard library of the interpreter, so that nothing is downloaded."""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .tokenizer import Vocabulary


@dataclass(frozen=True)
class Corpus:
    """Documents by use. Held-out documents are chosen by the hash of their name."""

    train: list[str]
    train_chat: list[str]
    held_out: list[str]
    held_out_chat: list[str]


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def is_table(source: str) -> bool:
    """Generated files (character tables, opcodes) are mostly digits and teach nothing."""
    return sum(c.isdigit() for c in source) > 0.1 * len(source)


def standard_library() -> Iterator[tuple[str, str]]:
    """Names and sources of the standard library, without tests and generated encodings."""
    skipped = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            source = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if len(source) > 200 and not is_table(source):
            yield relative.as_posix(), source


def help_topics() -> Iterator[tuple[str, str]]:
    """The language reference that `help()` shows: the prose of the corpus."""
    from pydoc_data.topics import topics

    yield from sorted(topics.items())


def dedent_source(source: str, node: ast.FunctionDef) -> str:
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)


def chat_examples(name: str, source: str, vocabulary: Vocabulary) -> Iterator[str]:
    """Questions about a module and requests for its functions, answered from its source."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    purpose = (ast.get_docstring(tree) or "").split("\n\n")[0]
    if len(purpose) > 30:
        yield vocabulary.chat(f"What is the module {module} for?", purpose)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        doc = ast.get_docstring(node) or ""
        code = dedent_source(source, node)
        if len(doc) < 20 or not 100 < len(code) < 1500:
            continue
        yield vocabulary.chat(f"Write the function {node.name}: {doc.splitlines()[0]}", code)
        if len(doc) > 80:
            yield vocabulary.chat(f"What does the function {node.name} of {module} do?", doc)


def read_corpus(vocabulary: Vocabulary, chat_share: float = 0.15) -> Corpus:
    """Read all text. Chat examples are thinned, by hash, to `chat_share` of the characters."""
    corpus = Corpus([], [], [], [])
    for name, source in standard_library():
        held_out = is_held_out(name)
        (corpus.held_out if held_out else corpus.train).append(source)
        (corpus.held_out_chat if held_out else corpus.train_chat).extend(
            chat_examples(name, source, vocabulary)
        )
    for name, text in help_topics():
        (corpus.held_out if is_held_out(name) else corpus.train).append(text)
    wanted = chat_share / (1 - chat_share) * sum(map(len, corpus.train))
    share = wanted / sum(map(len, corpus.train_chat))
    kept = [
        example
        for example in dict.fromkeys(corpus.train_chat)
        if int(hashlib.sha256(example.encode()).hexdigest()[:8], 16) < share * 2**32
    ]
    return Corpus(corpus.train, kept, corpus.held_out, list(dict.fromkeys(corpus.held_out_chat)))


def digest(corpus: Corpus) -> str:
    everything = "\0".join(corpus.train + corpus.train_chat)
    return hashlib.sha256(everything.encode()).hexdigest()
