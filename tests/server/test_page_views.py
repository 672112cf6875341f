"""The chat page in a real browser: the batch view, the list of chats, the settings, and how it looks where."""

import json

import pytest
from helpers.browser import SHIFT
from helpers.chat_page import IS_DONE, READY, SCRIPT, ask, chats, send, stored
from helpers.web_server import wait_until

pytestmark = pytest.mark.browser

HAS_NO_SIDEWAYS_SCROLL = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
ALL_CARDS_DONE = "document.querySelectorAll('.card footer button:not([hidden])').length === 8"


def colors_of(page, canvas):
    """Returns how many colors a canvas shows."""
    return page.run(
        f"(() => {{ const c = document.querySelector('{canvas}'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
        "for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) seen.add(d.slice(i, i + 3).join());"
        "return seen.size; })()"
    )


def test_eight_answers_at_once_show_the_engine_at_work(page, pace):
    page.click("#show-batch")
    page.click("#batch-prompt")
    page.type("Hi")
    pace.hold(after=4)
    page.click("#batch-start")
    page.wait_for_text("#slots-now", "4 of 4 running, 4 waiting")
    page.wait_for_text("#blocks-now", "of 39 in use")
    assert page.text("#blocks-now") != "0 of 39 in use, 0 cached"
    page.wait("document.querySelectorAll('.card.is-running').length === 4")
    assert page.count(".card") == 8
    assert colors_of(page, "#slots-canvas") >= 3  # free, prompt, output
    assert colors_of(page, "#blocks-canvas") >= 2
    pace.free()
    page.wait(ALL_CARDS_DONE)
    page.wait_for_text("#slots-now", "0 of 4 running, 0 waiting")
    page.wait("!document.querySelector('#rates-now').innerText.startsWith('0 tok/s out')")
    assert colors_of(page, "#rates-canvas") >= 2
    assert all("光 is light." in text for text in page.texts(".card-text"))
    assert "8 answers" in page.text("#batch-summary")
    (body,) = chats(page)  # on one connection: a browser has six for a server
    assert body["n"] == 8
    page.click(".card:nth-child(3) footer button")
    assert page.text(".bubble") == "Hi" and "光 is light." in page.text(".prose")
    assert [message["role"] for message in stored(page)["messages"]] == ["user", "assistant"]


def test_all_answers_of_a_batch_are_stopped_together(page, chat_server, pace):
    page.click("#show-batch")
    page.choose("#batch-count", "3")
    pace.hold(after=4)
    page.click("#batch-prompt")
    page.type("Hi")
    page.press("Enter")
    page.wait("document.querySelectorAll('.card.is-running').length === 3")
    page.press("Escape")
    page.wait("document.querySelectorAll('.card.is-running').length === 0")
    pace.free()
    page.wait_for_text("#slots-now", "0 of 4 running")
    wait_until(lambda: chat_server.num_held_blocks() == 0)


def test_settings_are_sent_and_kept_and_wrong_ones_are_marked(page):
    page.click("#open-settings")
    page.choose("#system-prompt", "Be brief.")
    page.choose("#set-temperature", "0.5")
    page.choose("#set-top_k", "7")
    page.choose("#set-seed", "3")
    page.choose("#set-top_p", "1.5")
    assert page.run("document.querySelector('#set-top_p').ariaInvalid") == "true"
    assert page.text("#error-top_p") == "0 to 1"
    page.choose("#thinking", "off")
    ask(page, "Hi")
    (body,) = chats(page)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.5, 7, 3)
    assert not {"top_p", "min_p", "max_tokens", "logprobs"} & set(body)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    page.reload()
    assert page.run("document.querySelector('#set-temperature').value") == "0.5"
    page.click("#new-chat")
    assert page.run("document.querySelector('#system-prompt').value") == "Be brief."
    page.click("#open-settings")
    page.click("#reset-settings")
    page.click("#conversations .open-chat")
    assert page.run("document.querySelector('#system-prompt').value") == "Be brief."


def test_a_token_shows_its_probability_and_what_else_was_likely(page):
    page.click("#open-settings")
    page.click("#show-tokens")
    page.click("#close-settings")
    ask(page, "Hi")
    (body,) = chats(page)
    assert body["logprobs"] is True and body["top_logprobs"] == 5
    assert page.run("document.querySelector('.prose').textContent") == SCRIPT
    page.hover(".token:nth-child(2)")
    page.wait("!document.querySelector('#token-box').hidden")
    assert page.count("#token-box .token-row") == 5
    assert "**bold**" in page.text("#token-box .token-head") and "%" in page.text("#token-box .token-head")
    page.run("document.querySelector('.prose').focus()")
    page.press("ArrowRight")
    assert "words," in page.text("#token-box .token-head")
    page.press("Escape")
    assert page.run("document.querySelector('#token-box').hidden")
    page.click("[title='Show text']")
    assert page.text(".prose strong") == "bold"


def test_chats_are_renamed_found_deleted_and_brought_back(page):
    ask(page, "First")
    page.click("#new-chat")
    ask(page, "Second")
    assert page.texts(".open-chat") == ["Second", "First"]
    page.hover("#conversations li:nth-child(2)")
    page.click("#conversations li:nth-child(2) [title='Rename']")
    page.wait("document.activeElement.matches('#conversations input')")
    page.type("Third")
    page.press("Enter")
    assert page.texts(".open-chat") == ["Second", "Third"]
    page.choose("#search", "thi")
    assert page.texts(".open-chat") == ["Third"]
    page.choose("#search", "light.")  # what was said in them is searched too
    assert len(page.texts(".open-chat")) == 2
    page.choose("#search", "")
    page.hover("#conversations li:nth-child(1)")
    page.click("#conversations li:nth-child(1) [title='Delete']")
    assert page.texts(".open-chat") == ["Third"] and page.text(".bubble") == "First"
    page.click("#toast .button")
    assert page.texts(".open-chat") == ["Second", "Third"]


def test_chats_are_exported_and_imported(page, tmp_path):
    ask(page, "Hi")
    page.run(
        "URL.createObjectURL = (blob) => { window.exported = blob.text(); return 'blob:none'; };"
        "HTMLAnchorElement.prototype.click = function () { window.exportedName = this.download; }"
    )
    page.click("#export-all")
    exported = json.loads(page.run("window.exported"))
    assert page.run("window.exportedName") == "photon-chats.json"
    assert exported["conversations"] == [stored(page)]
    file = tmp_path / "chats.json"
    exported["conversations"][0]["messages"][0]["content"] = "Changed"
    file.write_text(json.dumps(exported), encoding="utf-8")
    page.set_files("#import-file", [file])
    page.wait_for_text("#toast", "1 imported.")
    assert sorted(page.texts(".open-chat")) == ["Changed", "Hi"]  # the one that was there stays
    file.write_text('{"conversations": [1]}', encoding="utf-8")
    page.set_files("#import-file", [file])
    page.wait_for_text("#toast", "no chats of this page")
    assert page.count(".open-chat") == 2


def test_damaged_storage_harms_nothing(page):
    ask(page, "Hi")
    page.run("localStorage.setItem('photon.chat.x', '{'); localStorage.setItem('photon.settings', '[')")
    page.reload()
    assert page.texts(".open-chat") == ["Hi"]


def test_a_full_storage_is_told(page):
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    ask(page, "Hi")
    page.wait_for_text("#toast", "storage is full")
    assert "光 is light." in page.text(".prose")


def test_a_phone_needs_no_sideways_scroll_and_breaks_lines_with_enter(browser, chat_server):
    with browser.page(chat_server.url, width=360, height=740, is_phone=True) as page:
        page.wait(READY)
        page.click("#message-input")
        page.type("x" * 80)
        page.press("Enter")
        assert page.count(".message") == 0
        page.click("#send")
        page.wait(IS_DONE)
        assert page.run(HAS_NO_SIDEWAYS_SCROLL)
        page.click("#open-sidebar")
        page.wait("document.querySelector('#sidebar').getBoundingClientRect().left === 0")
        assert page.run(HAS_NO_SIDEWAYS_SCROLL)
        page.click("#close-sidebar")
        page.wait("document.querySelector('#sidebar').getBoundingClientRect().right <= 0")
        page.click("#open-settings")
        assert page.run(HAS_NO_SIDEWAYS_SCROLL)
        page.click("#close-settings")
        page.click("#show-batch")
        page.click("#batch-start")
        page.wait(ALL_CARDS_DONE)
        assert page.run(HAS_NO_SIDEWAYS_SCROLL)
    assert not page.errors and not page.failures


def test_the_page_speaks_chinese_where_the_browser_does_and_on_demand(browser, chat_server):
    with browser.page(chat_server.url, language="zh-CN") as page:
        page.wait(READY)
        assert page.run("document.documentElement.lang") == "zh-CN"
        assert page.text("#new-chat") == "新对话" and page.text("#model-phase") == "就绪"
        ask(page, "光")
        assert "词元" in page.text(".stats")
        page.choose("#language", "en")
        assert page.text("#new-chat") == "New chat" and "tokens" in page.text(".stats")
        page.reload()
        assert page.text("#new-chat") == "New chat"
    assert not page.errors and not page.failures


def test_light_and_dark_follow_the_system_until_one_is_chosen(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = page.run(background)
    assert light != dark
    page.choose("#theme", "light")
    page.reload()
    assert page.run(background) == light
    page.choose("#theme", "")
    assert page.run(background) == dark


def test_everything_that_can_be_used_has_a_name(page):
    ask(page, "Hi")
    page.click("#open-settings")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "checkbox", "spinbutton", "searchbox", "link"}
    usable = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert len(usable) > 20
    assert not [node for node in usable if not node["name"]["value"].strip()]


def test_the_keyboard_reaches_what_the_pointer_does(page):
    send(page, "Hi")
    page.wait(IS_DONE)
    page.run("document.activeElement.blur()")
    page.run("document.querySelector('#message-input').focus()")
    page.press("Tab", modifiers=SHIFT)
    assert page.run("document.activeElement.title") == "Edit"
    page.press("Enter")
    page.wait("document.activeElement.matches('.editor')")
    page.press("Escape")
    assert page.count(".editor") == 0 and "光 is light." in page.text(".prose")
