// Opens the page: where its bytes come from, the state in its address, the keys.

import { App } from "./app.js";
import { openSource } from "./data/source.js";
import { listenForKeys } from "./state/keys.js";
import { Store } from "./state/store.js";

export const app = new App(new Store(), openSource());
listenForKeys(app);
app.start();
