"""The report's style sheet and its small pieces of HTML. Everything that comes from a run is escaped; a policy in the page forbids scripts and network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from rlcli.runs.samples import harmless

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b2230;--soft:#667085;--line:#e4e7ec;--good:#0f8a5f;--bad:#c4384b;--warn:#a86400;
--c1:#3366e0;--c2:#e07a1f;--c3:#0f9d74;--c4:#b04ad0;--c5:#8a93a3;--c6:#d14b6a;--c7:#2ba6b8;--c8:#9a7b2f}
@media(prefers-color-scheme:dark){:root{--bg:#0f131a;--card:#181e28;--ink:#e7ebf2;--soft:#97a3b6;--line:#2a3240;--good:#44cf97;--bad:#ff7d8d;--warn:#f0b55a;
--c1:#7da2ff;--c2:#f5a35c;--c3:#4fd1a5;--c4:#d592ee;--c5:#7f8a9c;--c6:#f58aa2;--c7:#67d3e3;--c8:#d3b468}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1320px;margin:0 auto;padding:28px 20px 64px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:36px 0 12px}
.top{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:center}
.sub{color:var(--soft);margin:6px 0 0;overflow-wrap:anywhere}
.pill{font-size:13px;font-weight:600;padding:2px 10px;border-radius:99px;border:1px solid currentColor}
.finished{color:var(--good)}.failed{color:var(--bad)}.stopped,.running{color:var(--warn)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(176px,1fr));gap:12px;margin-top:22px}
.card,.chart,.box{background:var(--card);border:1px solid var(--line);border-radius:12px}
.card{padding:13px 15px}
.card b{display:block;font-size:22px;line-height:1.25;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.card span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,390px),1fr));gap:14px}
.chart{padding:14px 14px 8px;display:flex;flex-direction:column}
.chart h3{font-size:15px;margin:0;display:inline}
.chart .about{color:var(--soft);font-size:13px;margin-left:8px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;margin:4px 0 6px;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.legend b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;display:block;margin-top:auto}
svg text{fill:var(--soft);font-size:11.5px;font-family:inherit;font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--line);stroke-width:1}
svg polyline{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .raw{opacity:.28;stroke-width:1.2}
svg .tip{fill:var(--ink);opacity:0}svg .tip:hover{opacity:.06}
.box{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;font-size:13px;border-top:0}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}th.n{text-align:right}
td.soft{color:var(--soft)}
code,.text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Noto Sans Mono",monospace;font-size:13px}
td code{overflow-wrap:anywhere}
details summary{cursor:pointer;padding:11px 15px;font-weight:600}
details.row{border-top:1px solid var(--line)}
details.row summary{font-weight:400;display:grid;grid-template-columns:62px 78px minmax(0,1fr) 92px;gap:10px;align-items:baseline;padding:8px 15px}
details.row summary .text{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
details.row summary::-webkit-details-marker{display:none}
.head{display:grid;grid-template-columns:62px 78px minmax(0,1fr) 92px;gap:10px;padding:8px 15px;color:var(--soft);font-size:13px;font-weight:600}
.row .inner{padding:2px 15px 14px;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:12px}
.inner pre{margin:4px 0 0;padding:10px 12px;background:var(--bg);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;max-height:420px;overflow-y:auto}
.right{color:var(--good);font-weight:600}.wrong{color:var(--bad);font-weight:600}
.r{text-align:right;color:var(--soft);font-variant-numeric:tabular-nums}
.filter{display:flex;flex-wrap:wrap;gap:16px;padding:11px 15px;border-bottom:1px solid var(--line);font-size:14px}
.filter label{cursor:pointer}
.samples:has(#only-right:checked) .is-wrong,.samples:has(#only-wrong:checked) .is-right{display:none}
footer{color:var(--soft);font-size:13px;margin-top:36px}
@media(max-width:560px){main{padding:18px 12px 48px}.cards{grid-template-columns:1fr 1fr}.card b{font-size:18px}
details.row summary,.head{grid-template-columns:44px 62px minmax(0,1fr)}details.row summary .r,.head .r{display:none}th,td{padding:7px 10px}}
""" + "".join(f"svg .l{n}{{stroke:var(--c{n})}}svg .m{n},svg .b{n}{{fill:var(--c{n})}}.legend .k{n}{{background:var(--c{n})}}" for n in range(1, 9))


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def card(label: str, value: str) -> str:
    """One figure of the summary."""
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def chart(title: str, about: str, svg: str, legend: Iterable[tuple[str, str]]) -> str:
    """A chart with its title and legend; `svg` is ours and is not escaped."""
    keys = "".join(f'<span><i class="k{number}"></i>{escape(name)} <b>{escape(value)}</b></span>' for number, (name, value) in enumerate(legend, 1))
    return f'<figure class="chart" style="margin:0"><figcaption><h3>{escape(title)}</h3><span class="about">{escape(about)}</span></figcaption><div class="legend">{keys}</div>{svg}</figure>'


def table(heads: list[str], rows: Iterable[list[str]], numbers: tuple[int, ...] = (), code: tuple[int, ...] = (), soft: tuple[int, ...] = ()) -> str:
    """A table of texts. Columns in `numbers` stand to the right, in `code` in fixed width, in `soft` in a fainter colour."""

    def cell(place: int, text: str) -> str:
        kind = "n" if place in numbers else "soft" if place in soft else ""
        inner = f"<code>{escape(text)}</code>" if place in code else escape(text)
        return f'<td class="{kind}">{inner}</td>' if kind else f"<td>{inner}</td>"

    head = "".join(f'<th class="n">{escape(text)}</th>' if place in numbers else f"<th>{escape(text)}</th>" for place, text in enumerate(heads))
    body = "".join("<tr>" + "".join(cell(place, text) for place, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, body: str) -> str:
    """Something that opens on a click."""
    return f'<details class="box"><summary>{escape(title)}</summary>{body}</details>'


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def sample(row: dict[str, object]) -> str:
    """One sample: a line that opens into prompt and response. Its texts are a model's, so hostile."""
    right = bool(row.get("correct"))
    kind, word = ("right", "right") if right else ("wrong", str(row.get("reason", "wrong")).replace("_", " "))
    facts = f"answer {row.get('answer')!s} · extracted {row.get('extracted')!s} · score {row.get('score')} · {row.get('finish')} · log-prob {_short(row.get('logprob'))}"
    if row.get("group_samples"):
        facts += f" · {row['group_correct']} of {row['group_samples']} of its group right"
    return (
        f'<details class="row is-{kind}"><summary><span class="r" style="text-align:left">{escape(str(row.get("step")))}</span><span class="{kind}">{escape(word)}</span>'
        f'<span class="text">{_text(row, "response", 300)}</span><span class="r">{escape(str(row.get("tokens")))} tokens</span></summary>'
        f'<div class="inner"><div>Prompt<pre class="text">{_text(row, "prompt")}</pre></div><div>Response<pre class="text">{_text(row, "response")}</pre>'
        f'<span class="sub">{escape(harmless(facts))}</span></div></div></details>'
    )


def _text(row: dict[str, object], name: str, most: int = 100_000) -> str:
    return escape(harmless(str(row.get(name))[:most]))


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
