// Address of the server and common test data for all scripts of this folder.
export const ROOT = process.env.TRIOSERVE_URL.replace(/\/$/, "");
export const BASE_URL = ROOT + "/v1";
export const MODEL = process.env.TRIOSERVE_MODEL ?? "scripted";
export const KEY = process.env.TRIOSERVE_API_KEY ?? "none";
export const USER = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
export const WEATHER = {
  name: "get_weather",
  description: "The weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};
