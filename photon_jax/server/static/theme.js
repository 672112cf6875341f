// Runs before the first paint, so that a chosen theme does not flash; theme_switch.js changes the choice.
const chosenTheme = localStorage.getItem("photon.theme");
if (chosenTheme === "light" || chosenTheme === "dark") document.documentElement.dataset.theme = chosenTheme;
