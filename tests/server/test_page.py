"""The chat page in a real browser: answers come, are stopped, redone and continued, and nothing leaves the origin."""

import pytest
from helpers.chat_page import HAS_ENDED, IS_DONE, READY, ask, chats, send, serving_page, stored
from helpers.web_server import wait_until

pytestmark = pytest.mark.browser

USER_HTML = '<img src=x onerror="document.title=2">'


def answers(page):
    return page.texts(".is-answer .prose")


def test_an_answer_streams_in_and_ends_with_its_numbers(page, pace):
    pace.hold(after=4)
    send(page, "Hi")
    page.wait_for_text(".is-running .prose", "Some bold words")
    assert page.text(".bubble") == "Hi"
    page.wait_for_text("#live", "first token")
    assert "光" not in page.text(".prose")
    pace.free()
    page.wait(IS_DONE)
    assert page.text(".prose strong") == "bold"
    assert page.text(".code pre").strip() == "x = 1" and page.text(".code-head") == "py"
    assert "光 is light." in page.text(".prose")
    assert "tok/s" in page.text(".stats") and "first token" in page.text(".stats")
    (body,) = chats(page)
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert body["stream"] and body["return_progress"]


def test_html_of_the_user_and_of_the_model_stays_text(page):
    ask(page, f"see {USER_HTML}")
    assert page.text(".bubble") == f"see {USER_HTML}"
    assert '<img src=x onerror="document.title=1">' in page.text(".prose")
    assert page.count("#message-list img, #message-list script, [onerror]") == 0
    assert page.run("document.title") not in ("1", "2")


def test_hostile_markdown_loads_and_runs_nothing(page):
    markdown = (
        "[a](javascript:document.title=1) ![b](https://example.org/b.png) <svg onload=document.title=1>"
        "\n\n<script>document.title=1</script>\n\n<style>*{display:none}</style>\n\n[c](https://example.org/)"
    )
    page.script_answers({"choices": [{"index": 0, "delta": {"content": markdown}, "finish_reason": "stop"}]})
    send(page, "Hi")
    page.wait(HAS_ENDED)
    tags = page.run("[...document.querySelectorAll('.prose *')].map((node) => node.tagName)")
    assert sorted(tags) == ["A"] * 3 + ["P"] * 4
    links = page.run("[...document.querySelectorAll('.prose a')].map((link) => link.getAttribute('href'))")
    assert links == [None, "https://example.org/b.png", "https://example.org/"]
    assert page.run("document.querySelector('.prose a:last-child').rel") == "noopener noreferrer nofollow"


def test_script_and_html_from_text_are_refused_by_the_browser(failing_page):
    page = failing_page
    page.run("(() => { const s = document.createElement('script'); s.append('document.title = 3'); })()")
    assert page.run("(() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } })()") == (
        "TypeError"
    )
    page.errors.clear()  # the browser tells of it


@pytest.mark.parametrize("by", ["key", "button"])
def test_a_stopped_answer_keeps_its_text_frees_its_blocks_and_can_be_continued(page, chat_server, pace, by):
    pace.hold(after=5)
    send(page, "Hi")
    page.wait_for_text(".is-running .prose", "words,")
    if by == "key":
        page.press("Escape")
    else:
        page.click("#stop")
    page.wait_for_text(".stats", "Stopped.")
    pace.free()
    part = stored(page)["messages"][1]["content"]
    assert part.startswith("Some **bold** words,") and "光" not in part
    page.wait("!document.querySelector('#send').hidden")
    page.click(".message:last-child .button")
    page.wait("document.querySelector('.stats')?.innerText.includes('Stopped.') === false")
    page.wait(IS_DONE)
    body = chats(page)[-1]
    assert body["continue_final_message"] and not body["add_generation_prompt"]
    assert body["messages"][-1] == {"role": "assistant", "content": part}
    assert answers(page)[0].count("Some bold") == 2  # what it had, and the script once more
    wait_until(lambda: chat_server.num_held_blocks() == 0)


def test_an_answer_is_made_again(page):
    ask(page, "Hi")
    page.click("[title='Answer again']")
    page.wait("document.querySelectorAll('.is-running').length === 1")
    page.wait(IS_DONE)
    first, again = chats(page)
    assert first == again
    assert len(answers(page)) == 1 and page.count(".is-user") == 1


def test_editing_an_earlier_message_drops_what_came_after(page):
    ask(page, "Hi")
    page.script_answers({"choices": [{"index": 0, "delta": {"content": "second"}, "finish_reason": "stop"}]})
    send(page, "And then?")
    page.wait("document.querySelectorAll('.is-answer .message-actions').length === 2")
    page.hover(".message.is-user")
    page.click(".message.is-user [title='Edit']")
    page.run("document.querySelector('.editor').select()")
    page.type("Ho")
    page.click(".edit-form [type=submit]")
    page.wait("document.querySelectorAll('.message').length === 2")
    page.wait(HAS_ENDED)
    assert page.texts(".bubble") == ["Ho"] and answers(page) == ["second"]
    assert chats(page)[-1]["messages"] == [{"role": "user", "content": "Ho"}]


def test_an_answer_can_be_corrected_by_hand(page):
    ask(page, "Hi")
    page.click(".is-answer [title='Edit']")
    page.run("document.querySelector('.editor').select()")
    page.type("Better")
    page.click(".edit-form [type=submit]")
    page.wait_for_text(".prose", "Better")
    page.reload()
    assert answers(page) == ["Better"]


def test_two_chats_run_at_once_and_go_on_unseen(page, chat_server, pace):
    pace.hold(after=4)
    send(page, "one")
    page.wait_for_text(".prose", "Some")
    page.click("#new-chat")
    assert page.count(".message") == 0
    send(page, "two")
    pace.hold(after=4)
    page.wait("document.querySelectorAll('.running-dot').length === 2")
    page.wait_for_text(".is-running .prose", "Some")
    assert chat_server.state.engine.stats().num_running == 2
    page.click("#conversations li:nth-child(2) .open-chat")
    assert page.text(".bubble") == "one" and page.text(".prose").startswith("Some")
    pace.free()
    page.wait("document.querySelectorAll('.running-dot').length === 0")
    assert "光 is light." in page.text(".prose")
    page.click("#conversations li:not(.is-active) .open-chat")
    assert page.text(".bubble") == "two" and "光 is light." in page.text(".prose")


def test_a_reload_keeps_the_history_and_the_part_of_an_answer(page, pace):
    ask(page, "Hi")
    before = page.text("#message-list")
    page.reload()
    assert page.text("#message-list") == before
    pace.hold(after=6)
    page.click("#new-chat")
    send(page, "Ho")
    page.wait_for_text(".is-running .prose", "Some bold")
    page.reload()
    page.wait_for_text(".stats", "Stopped.")
    assert page.text(".prose").startswith("Some bold")
    assert len(page.texts(".open-chat")) == 2


def test_keys_send_break_lines_and_leave_an_input_method_alone(page):
    page.click("#message-input")
    page.press("Enter")  # nothing to send
    page.type("one")
    page.press("Enter", modifiers=8)
    page.type("two")
    assert page.run("document.querySelector('#message-input').value") == "one\ntwo"
    composing = "{key: 'Enter', isComposing: true, bubbles: true, cancelable: true}"
    page.run(f"document.querySelector('#message-input').dispatchEvent(new KeyboardEvent('keydown', {composing}))")
    assert page.count(".message") == 0
    page.press("Enter")
    page.wait(IS_DONE)
    assert chats(page)[0]["messages"][0]["content"] == "one\ntwo"
    assert page.run("document.activeElement.id") == "message-input"


def test_thoughts_are_folded(page):
    deltas = [{"reasoning": "First, "}, {"reasoning": "think."}, {"content": "Then say."}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    page.script_answers(*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    send(page, "Hi")
    page.wait(HAS_ENDED)
    assert page.text(".prose") == "Then say." and page.text(".thinking summary") == "Thoughts"
    assert page.run("document.querySelector('.thoughts').checkVisibility()") is False
    page.click(".thinking summary")
    assert page.text(".thoughts") == "First, think."


def test_the_progress_of_a_long_prompt_is_shown(page, pace):
    pace.hold(after=1)  # a step computes 32 tokens
    send(page, "x" * 1000)
    page.wait_for_text("#live", "Reading the prompt")
    done, total = page.run("[document.querySelector('.live-bar').value, document.querySelector('.live-bar').max]")
    assert 32 <= done < total and f"{done} of {total} tokens" in page.text("#live")
    pace.free()
    page.wait(IS_DONE)


def test_errors_of_the_server_are_shown_in_its_words_and_can_be_retried(failing_page):
    page = failing_page
    send(page, "x" * 3000)  # longer than the model reads
    page.wait_for_text(".error", "The server refused the request.")
    assert "256" in page.text(".error p")
    page.script_answers({"choices": [{"index": 0, "delta": {"content": "now"}, "finish_reason": "stop"}]})
    page.click(".error .button")
    page.wait_for_text(".prose", "now")
    assert page.count(".error") == 0


def test_an_error_in_the_middle_of_a_stream_keeps_what_came(failing_page):
    page = failing_page
    error = {"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": None}}
    page.script_answers({"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]}, error)
    send(page, "Hi")
    page.wait_for_text(".error", "the engine failed")
    assert page.text(".prose") == "half"
    assert "Continue" in page.text(".message-foot")


def test_a_server_that_goes_away_is_said_to_be_gone(browser, chat_server):
    with serving_page() as (other, pace), browser.page(other.url) as page:
        page.wait(READY)
        pace.hold(after=4)
        send(page, "Hi")
        page.wait_for_text(".prose", "Some")
        page.run("fetch = async () => { throw new TypeError('gone'); }")
        page.run("document.querySelector('#stop').click()")
        page.wait_for_text(".stats", "Stopped.")
        send(page, "Ho")
        page.wait_for_text(".error", "The connection to the server was lost.")
        page.wait_for_text("#notice", "does not answer")
        assert page.run("document.querySelector('#send').disabled") is True


def test_a_page_that_opens_while_the_model_loads_says_so_and_waits(browser, chat_server):
    chat_server.state.phase, chat_server.state.loading_message = "loading", "reading weights 3 of 9"
    with browser.page(chat_server.url) as page:
        page.wait_for_text("#notice", "reading weights 3 of 9")
        send(page, "Hi")
        assert page.count(".message") == 0 and page.run("document.querySelector('#message-input').value") == "Hi"
        chat_server.state.phase = "ready"
        page.wait(READY)
        page.press("Enter")
        page.wait(IS_DONE)
        chat_server.state.phase = "draining"
        page.wait("document.querySelector('#notice').hidden")
    assert not page.errors and not page.failures


def test_a_key_is_asked_for_and_kept(browser):
    with serving_page(api_keys=("secret",)) as (other, _), browser.page(other.url) as page:
        page.wait(READY)
        send(page, "Hi")
        page.wait_for_text(".error", "asks for an API key")
        page.click("#open-settings")
        page.choose("#api-key", "secret")
        page.click(".error .button")
        page.wait(IS_DONE)
        assert "光 is light." in page.text(".prose")
        assert not page.errors
