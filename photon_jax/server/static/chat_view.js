// The messages of the conversation that is open.
import { byId, el } from "./dom.js";
import { t } from "./i18n.js";
import { AnswerView, UserMessageView } from "./message_view.js";

const NEAR_END_PX = 60;

export class ChatView {
  /** `actions` are those of the messages; `tokenBox` shows tokens. */
  constructor(actions, tokenBox) {
    this.actions = actions;
    this.tokenBox = tokenBox;
    this.views = new Map(); // message -> its view
    this.scroller = byId("messages");
    this.list = byId("message-list");
    this.latest = byId("to-latest");
    this.isAtEnd = true;
    this.scroller.addEventListener("scroll", () => this.noteScroll());
    this.latest.addEventListener("click", () => this.scrollToEnd());
  }

  noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.latest.hidden = this.isAtEnd;
  }

  scrollToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.noteScroll();
  }

  /** Shows all messages of a conversation, at their end. */
  show(conversation) {
    this.views.clear();
    this.tokenBox.hide();
    const views = conversation.messages.map((message) => this.makeView(message, conversation.settings.showsTokens));
    const empty = el("div", { class: "empty" }, el("h2", {}, t("chat.empty")), el("p", {}, t("chat.empty_sub")));
    this.list.replaceChildren(...(views.length > 0 ? views.map((view) => view.node) : [empty]));
    this.scrollToEnd();
  }

  makeView(message, showsTokens) {
    const view =
      message.role === "user"
        ? new UserMessageView(message, this.actions)
        : new AnswerView(message, this.actions, this.tokenBox, showsTokens);
    view.onDraw = () => this.isAtEnd && this.scrollToEnd();
    this.views.set(message, view);
    return view;
  }

  /** Draws one message anew. */
  update(message) {
    this.views.get(message)?.update();
  }
}
