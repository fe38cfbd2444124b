-- What HAProxy asks before it parses a request: is the head sound? HAProxy's own parser answers what it can't read with
-- a page in HTML that no setting replaces. Arguments: status and body of the answers to heads that are unsound, too
-- large, and unfinished.

local TOKEN = "[%w!#$%%&'*+.^_`|~-]+"
local MOST_FIELDS, MOST_BYTES = 100, 65536
local HTTP2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
local ONCE = { ["host"] = true, ["content-length"] = true, ["transfer-encoding"] = true }

-- The line that begins at a position, without its end, and the position behind it; nil if it has no end yet.
local function line(data, at)
    local stop = data:find("\n", at, true)
    if stop == nil then return nil, at end
    local text = data:sub(at, stop - 1):gsub("\r$", "")
    return text, stop + 1
end

-- The fields of a head by their lower-case names, and the position behind it; else nil and what is wrong with it.
local function fields(data, at)
    local seen, text = {}, nil
    for _ = 0, MOST_FIELDS do
        text, at = line(data, at)
        if text == nil then return nil, #data < MOST_BYTES and "unfinished" or "large" end
        if text == "" then return seen, at end
        local name, value = text:match("^(" .. TOKEN .. "):[ \t]*([^%z\r]-)[ \t]*$")
        if name == nil then return nil, "unsound" end
        name = name:lower()
        if ONCE[name] and seen[name] then return nil, "unsound" end
        seen[name] = value
    end
    return nil, "large"
end

-- False if what is here of a chunked body can't be one.
local function are_chunks(data, at)
    while true do
        local text, start = line(data, at)
        if text == nil then return #data - at < 100 and data:find("^%x*[ \t]*;?[^\r\n]*\r?$", at) ~= nil end
        local digits = text:match("^(%x+)[ \t]*$") or text:match("^(%x+)[ \t]*;")
        if digits == nil or #digits > 8 then return false end
        local stop = start + tonumber(digits, 16)
        if stop == start then return select(2, fields(data, start)) ~= "unsound" end -- trailers
        if stop > #data then return true end
        local ending = data:sub(stop, stop + 1)
        if ending ~= "\r\n" then return ending == "\r" and stop == #data end
        at = stop + 2
    end
end

local function is_host(text)
    return text:find("^[%w._~-]*:?%d*$") ~= nil or text:find("^%[[%x:.]+%]:?%d*$") ~= nil
end

-- "sound", "silent", or the name of the answer to this beginning of a request.
local function verdict(data)
    local at = 1
    while data:find("^\r?\n", at) do at = select(2, data:find("\n", at, true)) + 1 end
    if data:find("^\r?$", at) then return "silent" end
    if data:find("^PRI ", at) then
        return data:sub(1, #HTTP2) == HTTP2 and "sound" or HTTP2:sub(1, #data) == data and "unfinished" or "unsound"
    end
    local first, behind = line(data, at)
    if first == nil then
        -- Bytes of another protocol have no place in the first line.
        return data:find("^[ -~]*\r?$", at) == nil and "unsound" or #data < MOST_BYTES and "unfinished" or "large"
    end
    local method, target = first:match("^(" .. TOKEN .. ") ([!-~]+) HTTP/1%.[01]$")
    if method == nil or method == "CONNECT" or target:find("#", 1, true) then return "unsound" end
    local seen, stop = fields(data, behind)
    if seen == nil then return stop end
    local host, length, coding = seen["host"] or "", seen["content-length"], seen["transfer-encoding"]
    local authority = target:match("^https?://([^/?]+)")
    if not is_host(host) or authority and (not is_host(authority) or host ~= "" and host ~= authority) then
        return "unsound"
    end
    if authority == nil and target ~= "*" and target:sub(1, 1) ~= "/" then return "unsound" end
    if (seen["upgrade"] or ""):lower():find("websocket", 1, true) then return "unsound" end
    if length and not (length:find("^%d+$") and #length < 16) then return "unsound" end
    if coding and (length or coding:lower() ~= "chunked" or not are_chunks(data, stop)) then return "unsound" end
    return "sound"
end

core.register_fetches("head", function(txn)
    return verdict(txn.req:dup() or "")
end)

local answers = { ... }
for number, name in ipairs({ "unsound", "large", "unfinished" }) do
    local status, body = answers[2 * number - 1], answers[2 * number]
    local lines = {
        "HTTP/1.1 " .. status,
        "content-type: application/json",
        "content-length: " .. #body,
        "connection: close",
        "",
        body,
    }
    core.register_service(name, "tcp", function(applet)
        applet:send(table.concat(lines, "\r\n"))
    end)
end
