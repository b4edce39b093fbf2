// Before anything is drawn: the theme chosen earlier, else the system's.
"use strict";
{
  const NAME = "maple-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  const stored = () => {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null; // storage may be forbidden: the theme then lasts as long as the page
    }
  };
  const store = (theme) => {
    try {
      if (theme === null) localStorage.removeItem(NAME);
      else localStorage.setItem(NAME, theme);
    } catch {
      /* as above */
    }
  };
  const systemTheme = () => (system.matches ? "dark" : "light");
  const apply = (theme) => {
    root.dataset.theme = theme;
    document.getElementById("theme")?.setAttribute("aria-pressed", String(theme === "dark"));
  };
  const chosen = () => (["dark", "light"].includes(stored()) ? stored() : systemTheme());

  apply(chosen());
  system.addEventListener("change", () => apply(chosen()));
  addEventListener("DOMContentLoaded", () => {
    apply(chosen());
    document.getElementById("theme").addEventListener("click", () => {
      const theme = root.dataset.theme === "dark" ? "light" : "dark";
      store(theme === systemTheme() ? null : theme); // back at the system's theme, follow it again
      apply(theme);
    });
  });
}
